"use strict";
(function () {
  const COLOURS = { waiting: "#e3e7eb", running: "#f2a33a", done: "#1f8a70", inherited: "#9ccfc1", failed: "#cf3f4f" };
  const READ = "#2c6fbb", WRITTEN = "#e07a3f", SAMPLE = "#8a94a0", DONE = "#1f8a70";
  const at = (id) => document.getElementById(id);
  const say = (id, text) => {
    const node = at(id);
    if (node.textContent !== text) node.textContent = text;
    node.classList.toggle("none", text === "–");
  };
  const SVG = "http://www.w3.org/2000/svg";

  // Words and numbers

  function short(value) {
    const size = Math.abs(value);
    for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= limit * 0.9995) return [three(value / limit), unit];
    }
    return [size >= 100 || Number.isInteger(value) ? String(Math.round(value)) : three(value), ""];
  }
  function three(value) {
    const size = Math.abs(value);
    return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
  }
  function compact(value) { return value === 0 ? "0" : short(value).join(" ").trim(); }
  function exact(value) {
    if (value === 0) return "0";
    return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? String(+value.toPrecision(3)) : String(+value.toPrecision(4));
  }
  const grouped = (value) => Math.round(value).toLocaleString("en-US");
  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 9.95) return seconds.toFixed(1) + " s";
    seconds = Math.round(seconds);
    if (seconds < 60) return seconds + " s";
    const pad = (n) => String(n).padStart(2, "0");
    if (seconds < 3600) return Math.floor(seconds / 60) + " min " + pad(seconds % 60) + " s";
    const hours = Math.floor(seconds / 3600);
    if (hours < 48) return hours + " h " + pad(Math.floor(seconds / 60) % 60) + " min";
    return Math.floor(hours / 24) + " d " + (hours % 24) + " h";
  }
  function latency(seconds) {
    if (seconds === null) return "–";
    return seconds < 0.9995 ? three(seconds * 1000) + " ms" : three(seconds) + " s";
  }
  function whole(value) { return value >= 99.95 ? grouped(value) : value === 0 ? "0" : three(value); }
  function big(id, value, words) {
    const node = at(id), [number, unit] = value === null ? ["–", ""] : words ? [words(value), ""] : short(value);
    if (node.dataset.shown === number + unit) return;
    node.dataset.shown = number + unit;
    node.replaceChildren(number);
    if (unit) node.append(Object.assign(document.createElement("span"), { textContent: unit }));
    node.dataset.value = value === null ? "" : value;
    node.classList.toggle("none", value === null);
  }

  // Pictures

  function make(name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function sheet(id, empty) {
    const box = at(id), width = box.clientWidth, height = box.clientHeight;
    if (empty) {
      box.replaceChildren(Object.assign(document.createElement("div"), { className: "empty", textContent: empty }));
      return null;
    }
    const svg = make("svg", { viewBox: "0 0 " + width + " " + height });
    box.replaceChildren(svg);
    return { svg, width, height };
  }
  function ceiling(value) {
    const power = Math.pow(10, Math.floor(Math.log10(value)));
    return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.9999) * power;
  }
  function chart(id, lines, options) {
    // Lines of [x, y] over x from low to high; y from 0, or near the values where options.near is set.
    const points = lines.flatMap((line) => line.points);
    const paper = sheet(id, points.length ? "" : options.empty);
    if (!paper) return;
    const { svg, width, height } = paper, left = 50, right = 10, top = 8, bottom = 21;
    const ys = points.map((point) => point[1]), xs = points.map((point) => point[0]);
    const peak = Math.max(...ys);
    let low = 0, high = peak > 0 ? ceiling(peak * 1.04) : 1;
    let steps = 2;
    if (options.near) {
      const floor = Math.min(...ys), step = ceiling((peak - floor || Math.abs(peak) * 0.1 || 1) / 2);
      low = Math.floor(floor / step) * step;
      steps = Math.max(1, Math.ceil((peak - low) / step));
      high = low + steps * step;
    }
    const first = options.first !== undefined ? options.first : Math.min(...xs);
    const last = Math.max(options.last !== undefined ? options.last : Math.max(...xs), first + (options.least || 1e-9));
    const x = (value) => left + (value - first) / (last - first) * (width - left - right);
    const y = (value) => height - bottom - (value - low) / (high - low) * (height - top - bottom);
    for (let step = 0; step <= steps; step++) {
      const value = low + (high - low) * step / steps, place = Math.round(y(value)) + 0.5;
      svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: place, y2: place }));
      svg.append(make("text", { x: left - 7, y: place + 4, "text-anchor": "end" }, (options.label || compact)(value)));
    }
    svg.append(make("text", { x: left, y: height - 5 }, options.from));
    svg.append(make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, options.to));
    for (const line of lines) {
      if (!line.points.length) continue;
      const path = line.points.map((point) => x(point[0]).toFixed(1) + " " + y(point[1]).toFixed(1)).join(" L ");
      if (line.fill) {
        const ends = " L " + x(line.points[line.points.length - 1][0]).toFixed(1) + " " + y(low) + " L " +
          x(line.points[0][0]).toFixed(1) + " " + y(low) + " Z";
        svg.append(make("path", { d: "M " + path + ends, fill: line.colour, opacity: 0.12 }));
      }
      svg.append(make("path", { d: "M " + path, fill: "none", stroke: line.colour, "stroke-width": 2,
        "stroke-linejoin": "round", "stroke-linecap": "round" }));
      if (line.dots || line.points.length < 4) for (const point of line.points) {
        svg.append(make("circle", { cx: x(point[0]), cy: y(point[1]), r: 3, fill: line.colour }));
      }
    }
  }
  function overTime(values, bucket) { return values.map((value, place) => [(place + 0.5) * bucket, value]); }

  // Panels

  function mix(counts) {
    const names = ["waiting", "running", "done", "inherited", "failed"];
    if (counts[4]) return COLOURS.failed;
    if (counts[1]) return COLOURS.running;
    const total = counts.reduce((a, b) => a + b, 0), rgb = [0, 0, 0];
    counts.forEach((count, state) => {
      for (let part = 0; part < 3; part++) {
        rgb[part] += parseInt(COLOURS[names[state]].slice(1 + 2 * part, 3 + 2 * part), 16) * count / total;
      }
    });
    return "rgb(" + rgb.map(Math.round).join(",") + ")";
  }
  function showMap(chunks) {
    const paper = sheet("map", chunks && chunks.total ? "" : "no chunks yet");
    say("map-note", chunks ? chunks.task + ", " + grouped(chunks.total) +
      (chunks.cells.length < chunks.total ? " in " + chunks.cells.length + " cells" : "") : "");
    at("legend").hidden = !paper;
    if (!paper) return;
    const { svg, width, height } = paper, count = chunks.cells.length;
    let size = Math.min(60, Math.floor(Math.sqrt(width * height / count)));
    while (size > 3 && Math.ceil(count / Math.floor(width / size)) * size > height) size--;
    const columns = Math.min(count, Math.floor(width / size)), gap = size > 12 ? 3 : size > 6 ? 2 : 1;
    chunks.cells.forEach((cell, place) => {
      const colour = Array.isArray(cell) ? mix(cell) : COLOURS[chunks.states[cell]];
      const rect = make("rect", { x: place % columns * size, y: Math.floor(place / columns) * size, width: size - gap,
        height: size - gap, rx: Math.min(3, size / 5), fill: colour });
      const from = Math.ceil(place * chunks.total / count), to = Math.ceil((place + 1) * chunks.total / count) - 1;
      const words = Array.isArray(cell)
        ? chunks.states.map((name, state) => cell[state] ? cell[state] + " " + name : "").filter(Boolean).join(", ")
        : chunks.states[cell];
      rect.append(make("title", {}, (from === to ? "chunk " + from : "chunks " + from + "–" + to) + ": " + words));
      svg.append(rect);
    });
    at("legend").replaceChildren(...chunks.states.map((name) => {
      const item = document.createElement("li"), dot = document.createElement("i");
      dot.style.background = COLOURS[name];
      const number = Object.assign(document.createElement("b"), { textContent: grouped(chunks.counts[name]) });
      number.id = "count-" + name;
      item.append(dot, name, number);
      return item;
    }));
  }
  function div(className, text) { return Object.assign(document.createElement("div"), { className, textContent: text || "" }); }
  function track(share, className) {
    const outer = div("track " + className), inner = document.createElement("div");
    inner.style.width = Math.max(0, Math.min(100, 100 * share)) + "%";
    outer.append(inner);
    return outer;
  }
  function showWorkers(workers) {
    const fastest = Math.max(1, ...workers.map((worker) => worker.rows_per_second));
    const running = workers.reduce((sum, worker) => sum + worker.running, 0);
    say("workers-note", workers.length ? workers.length + ", " + running + " tasks under way" : "");
    if (!workers.length) { at("workers").replaceChildren(div("none", "no workers")); return; }
    const many = workers.length > 11;
    at("workers").className = many ? "many" : "";
    let nodes = [div("head", "worker"), div("head", "speed"), div("head right", "rows / s"), div("head", "memory")];
    nodes = many ? nodes.concat(nodes.map((node) => node.cloneNode(true))) : nodes.concat(div("head right", ""));
    for (const worker of workers.slice(0, 40)) {
      const own = worker.name && worker.name !== worker.address ? worker.name : worker.address.replace(/^.*:\/\//, "");
      const name = div("name" + (worker.running ? " busy" : ""), own);
      name.title = worker.address + ": " + grouped(worker.rows) + " rows in " + grouped(worker.chunks) + " chunks" +
        (worker.failures ? ", " + worker.failures + " failures" : "");
      const share = worker.memory_limit ? worker.memory / worker.memory_limit : 0;
      nodes.push(name, track(worker.rows_per_second / fastest, ""), div("right", compact(worker.rows_per_second)),
        track(share, "memory" + (share > 0.8 ? " full" : "")));
      const memory = (worker.memory / 1e9).toFixed(2) + (worker.memory_limit ? " / " + three(worker.memory_limit / 1e9) : "") + " GB";
      if (many) nodes[nodes.length - 1].title = memory; else nodes.push(div("right", memory));
    }
    if (workers.length > 40) nodes.push(div("none", "and " + (workers.length - 40) + " more"));
    at("workers").replaceChildren(...nodes);
  }
  function showBalance(balance) {
    const known = balance && balance.ones.length > 0, compared = known && balance.sample.length > 0;
    say("balance-note", compared ? "encoded against training" : known ? "no training sample in the model" : "");
    const paper = sheet("balance-plot", known ? "" : "nothing encoded yet");
    if (!paper) return;
    const { svg, width, height } = paper, bottom = 21, top = 8, left = 50, side = height - top - bottom;
    const wide = compared ? Math.min(width - left - 10, side * 1.9) : width - left - 10;
    const start = left + (width - left - 10 - wide) / 2;
    const y = (value) => height - bottom - value * side;
    const x = (value) => start + value * wide;
    for (const value of [0, 0.5, 1]) {
      svg.append(make("line", { class: "grid", x1: start, x2: start + wide, y1: y(value), y2: y(value) }));
      svg.append(make("text", { x: start - 7, y: y(value) + 4, "text-anchor": "end" }, 100 * value + " %"));
    }
    if (compared) {
      svg.append(make("line", { x1: x(0), y1: y(0), x2: x(1), y2: y(1), stroke: SAMPLE, "stroke-dasharray": "4 4" }));
      svg.append(make("text", { x: x(0), y: height - 5 }, "0 %"));
      svg.append(make("text", { x: x(1), y: height - 5, "text-anchor": "end" }, "100 %"));
      if (wide > 190) svg.append(make("text", { x: x(0.5), y: height - 5, "text-anchor": "middle" }, "ones in training"));
    } else svg.append(make("text", { x: x(0.5), y: height - 5, "text-anchor": "middle" }, "bit by bit"));
    balance.ones.forEach((share, bit) => {
      const place = compared ? balance.sample[bit] : (bit + 0.5) / balance.bits;
      const dot = make("circle", { cx: x(place), cy: y(share), r: balance.bits > 256 ? 1.8 : 3, fill: DONE, opacity: 0.65 });
      dot.append(make("title", {}, "bit " + bit + ": " + (100 * share).toFixed(1) + " % ones" +
        (compared ? ", " + (100 * place).toFixed(1) + " % in training" : "")));
      svg.append(dot);
    });
  }
  function showStages(stage, running) {
    const items = stage.finished.slice(-8).map((done) => {
      const item = document.createElement("li");
      item.append(Object.assign(document.createElement("b"), { textContent: done.stage }), duration(done.seconds));
      item.className = done.status === "done" || done.status === "nothing to do" ? "" : "bad";
      item.title = done.status;
      return item;
    });
    if (stage.name && running) {
      const item = Object.assign(document.createElement("li"), { className: "now" });
      item.append(Object.assign(document.createElement("b"), { textContent: stage.name }), duration(stage.seconds));
      items.push(item);
    }
    at("stages").replaceChildren(...items);
  }
  function showTroubles(failures) {
    say("failures", grouped(failures.count));
    at("failure-card").className = "card number" + (failures.count ? " some" : "");
    at("troubles").hidden = !failures.recent.length;
    at("trouble-list").replaceChildren(...failures.recent.slice(-6).reverse().map((entry) => {
      const item = document.createElement("li"), when = document.createElement("time"), where = document.createElement("b");
      when.textContent = new Date(1000 * entry.time).toTimeString().slice(0, 8);
      where.textContent = entry.where;
      item.append(when, where, entry.text);
      return item;
    }));
  }
  function showProgress(found) {
    const running = found.job.status === "running", step = found.step, stage = found.stage.name;
    const words = [stage, step && step.name !== stage ? step.name : ""];
    say("stage", words.filter(Boolean).join(" › ") || (running ? "between stages" : found.job.status));
    const share = step ? step.progress : null;
    say("of", step && step.total ? grouped(step.done) + " of " + grouped(step.total) : "");
    say("percent", share === null ? "–" : (share === 1 ? "100" : (Math.floor(share * 1000) / 10).toFixed(1)) + " %");
    say("eta", !running ? "–" : step ? duration(share === 1 ? null : step.eta_seconds) : "–");
    at("bar").style.width = 100 * (share || 0) + "%";
  }
  function show(found) {
    const job = found.job, status = job ? job.status : "waiting";
    at("och").className = job ? status : "quiet";
    say("status", status);
    say("job", job ? job.name : "no job yet");
    document.title = job ? (found.step && status === "running" ? Math.floor(100 * (found.step.progress || 0)) + " % " : status + " ") + job.name : "OCH";
    say("elapsed", job ? duration(job.seconds) : "");
    showWorkers(found.workers || []);
    if (!job) { show.empty(); return; }
    showStages(found.stage, status === "running");
    showProgress(found);
    showTroubles(found.failures);
    const speed = found.speed, series = speed.over_time, bucket = speed.bucket_seconds, average = speed.is_average ? "average" : "";
    const moved = series.rows.some((value) => value > 0);
    big("rows-rate", moved ? speed.rows_per_second : null);
    big("bytes-rate", moved ? speed.bytes_per_second / 1e6 : null, whole);
    say("rows-average", moved ? average : ""); say("bytes-average", moved ? average : "");
    const totals = Object.values(found.totals), rows = found.chunks && found.totals[found.chunks.task] ? found.totals[found.chunks.task].rows : null;
    big("rows-done", totals.length ? rows : null);
    showMap(found.chunks);
    const time = { from: "start", to: duration(job.seconds), first: 0, last: Math.max(job.seconds, 1) };
    chart("rows-plot", [{ points: moved ? overTime(series.rows, bucket) : [], colour: DONE, fill: true }], { ...time, empty: "no rows yet" });
    const mega = (values) => moved ? overTime(values.map((value) => value / 1e6), bucket) : [];
    chart("bytes-plot", [{ points: mega(series.read), colour: READ, fill: true }, { points: mega(series.written), colour: WRITTEN }],
      { ...time, empty: "no bytes yet", label: whole });
    const train = found.train, loss = train.loss, inertia = train.inertia;
    say("loss-note", loss.length ? exact(loss[loss.length - 1][1]) + ", |VVᵀ−I| " + (train.residual === null ? "n/a" : exact(train.residual)) : "");
    chart("loss-plot", [{ points: loss, colour: READ }], { empty: "no training in this job", near: true, label: exact, from: "step 0",
      to: loss.length ? "step " + loss[loss.length - 1][0] : "", least: 1 });
    say("inertia-note", train.exact_inertia !== null ? "all rows " + exact(train.exact_inertia) : inertia.length ? "mean squared distance" : "");
    chart("inertia-plot", [{ points: inertia, colour: WRITTEN, dots: inertia.length < 30 }], { empty: "no centres in this job", near: true,
      label: exact, from: "seeds", to: inertia.length ? "round " + inertia[inertia.length - 1][0] : "", least: 1 });
    showBalance(found.balance);
    const search = found.search;
    say("search-note", search ? "p50 " + latency(search.p50_seconds) + ", p95 " + latency(search.p95_seconds) : "");
    chart("search-plot", [{ points: search ? overTime(search.over_time, search.bucket_seconds) : [], colour: "#8d5bb5", fill: true }],
      { empty: "no search in this job", from: search ? grouped(search.queries) + " queries" : "", to: "queries / s", first: 0, least: 1 });
    say("others", found.others.length ? "also here: " + found.others.map((job) => job.name + " (" + job.status + ")").join(", ") : "");
  }
  show.empty = function () {
    at("stages").replaceChildren();
    say("stage", "no job has run on this scheduler yet"); say("percent", "–"); say("eta", "–"); say("of", "");
    for (const id of ["rows-rate", "bytes-rate", "rows-done"]) big(id, null);
    at("bar").style.width = 0;
    showMap(null); showBalance(null);
    for (const [id, empty] of [["rows-plot", "no rows yet"], ["bytes-plot", "no bytes yet"], ["loss-plot", "no training yet"],
      ["inertia-plot", "no centres yet"], ["search-plot", "no search yet"]]) chart(id, [], { empty });
  };

  let latest = null;
  async function look() {
    try {
      const answer = await fetch("och/status.json", { cache: "no-store" });
      latest = await answer.json();
      at("lost").hidden = true;
      show(latest);
    } catch (error) {
      at("lost").hidden = false;
      if (!(error instanceof TypeError)) console.error(error);
    }
    setTimeout(look, document.hidden ? 5000 : 1000);
  }
  window.addEventListener("resize", () => { if (latest) show(latest); });
  for (const link of document.querySelectorAll(".navbar a[href='och']")) link.closest("li").classList.add("active");
  look();
})();

"use strict";
// Draws the figures in the colours of the light or the dark scheme; a click on a name hides its method in the figures
// of quality, and while it is pointed at, the others are pale.
const text = document.getElementById("drawing").textContent;
const { dark, roots } = JSON.parse(text);
const scheme = matchMedia("(prefers-color-scheme: dark)");
const buttons = document.querySelectorAll(".key button");
const hidden = new Set();

function show(alone = null) {
  for (const name of ["map-over-bits", "recall"])
    for (const drawn of Bokeh.documents[0].get_model_by_name(name).renderers)
      if (drawn.name == "points")
        drawn.view.filter.booleans = Array.from(drawn.data_source.get_column("series"),
          series => !hidden.has(series) && (alone ?? series) == series);
      else {
        drawn.visible = !hidden.has(drawn.name);
        drawn.muted = (alone ?? drawn.name) != drawn.name;
      }
  for (const button of buttons) button.setAttribute("aria-pressed", !hidden.has(button.dataset.series));
}

async function draw() {
  const { figures } = JSON.parse(scheme.matches ? text.replace(/#[0-9a-f]{6}/g, ink => dark[ink] ?? ink) : text);
  Bokeh.documents.pop()?.clear();
  await Bokeh.embed.embed_items({ figures }, [{ docid: "figures", roots, root_ids: Object.keys(roots) }]);
  if (hidden.size) show();
  // A finger that is drawn over a figure moves the page.
  if (matchMedia("(pointer: coarse)").matches)
    for (const root of Bokeh.documents[0].roots())
      for (const model of root.references()) if (model.type == "BoxZoomTool") model.active = false;
}

Bokeh.logger.set_level("warn");
scheme.addEventListener("change", () => matchMedia("print").matches || draw());
// What is printed are pictures of the figures, as these keep the width that they have on the screen.
addEventListener("beforeprint", () => {
  for (const root of Bokeh.documents[0].roots())
    document.getElementById(root.name).append(Bokeh.index.find_one(root).export("png").canvas);
});
addEventListener("afterprint", () => document.querySelectorAll(".plot > canvas").forEach(picture => picture.remove()));
for (const key of document.querySelectorAll(".key")) key.hidden = false;
for (const button of buttons) {
  const { series } = button.dataset;
  button.addEventListener("click", () => { hidden.delete(series) || hidden.add(series); show(); });
  button.addEventListener("pointerenter", () => hidden.has(series) || show(series));
  button.addEventListener("pointerleave", () => show());
}
draw();

# Sourced by start-scheduler and start-worker: where the programs are, which settings hold, and who may connect.
# shellcheck shell=sh

say() { printf '%s\n' "$*" >&2; }

# use_programs: och and dask, of OCH_BIN or of the PATH; and the settings that come with och, unless /etc/dask has some.
use_programs() {
    if [ -n "${OCH_BIN:-}" ]; then PATH="$OCH_BIN:$PATH"; fi
    if ! command -v och >/dev/null || ! command -v dask >/dev/null; then
        say "och and dask are not on the PATH; name the folder that holds them: OCH_BIN=/path/to/.venv/bin $0"
        exit 2
    fi
    export PATH
    # Dask reads this place first, so that whatever else is said, in ~/.config/dask or by DASK_CONFIG, wins.
    if [ -z "${DASK_ROOT_CONFIG:-}" ] && ! [ -d /etc/dask ]; then
        DASK_ROOT_CONFIG=$(och settings --file) || exit 2
        export DASK_ROOT_CONFIG
    fi
}

is_loopback() { case $1 in 127.* | localhost | ::1 | \[::1\]) return 0 ;; *) return 1 ;; esac; }

# check_tls ROLE HOST: the certificates of ROLE are there; without any, HOST must be this machine only.
check_tls() {
    if [ -n "${OCH_TLS_DIR:-}" ]; then
        for file in "$OCH_TLS_DIR/ca.pem" "$OCH_TLS_DIR/$1.pem" "$OCH_TLS_DIR/$1.key"; do
            if ! [ -r "$file" ]; then
                say "$file cannot be read; make the certificates with cluster/tls/make-certs, or name their folder: OCH_TLS_DIR"
                exit 2
            fi
        done
    elif ! is_loopback "$2"; then
        say "$2 can be reached from elsewhere, and without TLS anybody there could run code here; make certificates with"
        say "cluster/tls/make-certs and name their folder: OCH_TLS_DIR"
        exit 2
    fi
}

#!/usr/bin/env bash
# Starts Prometheus, and Grafana where it is installed, for one vLLM server: run.sh [HOST:PORT], default localhost:8000
# Prometheus: http://localhost:9090, Grafana: http://localhost:3000 (admin, admin). Ctrl-C ends both.
# What they write is in a folder of their own, DATA, which is removed at the end unless you name it.
set -euo pipefail

server=${1:-localhost:8000}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=$PATH:$here/../../.venv/bin # where `make servers` puts it

if [[ -z ${DATA:-} ]]; then
    DATA=$(mktemp -d)
    trap 'rm -rf "$DATA"' EXIT
fi
mkdir -p "$DATA"

command -v prometheus >/dev/null || {
    printf '%s\n' >&2 'run.sh: there is no prometheus. Install it (Debian: apt-get install prometheus), or: make servers'
    exit 1
}
sed "s/localhost:8000/$server/" "$here/prometheus.yml" >"$DATA/prometheus.yml"
cp "$here/alerts.yaml" "$DATA"
prometheus --config.file="$DATA/prometheus.yml" --storage.tsdb.path="$DATA/prometheus" \
    --web.listen-address=localhost:9090 --log.level=warn &
children=($!)
trap 'kill "${children[@]}" 2>/dev/null || true' INT TERM
echo "Prometheus scrapes $server: http://localhost:9090"

export SAFE_OFFLOAD_DASHBOARDS=$here SAFE_OFFLOAD_PROMETHEUS=http://localhost:9090
export GF_PATHS_PROVISIONING=$here/provisioning GF_PATHS_DATA=$DATA/grafana
if command -v grafana >/dev/null; then
    grafana server --homepath "${GRAFANA_HOME:-/usr/share/grafana}" &
    children+=($!)
    echo 'Grafana: http://localhost:3000'
else
    cat <<MESSAGE
There is no grafana here. With docker:
    docker run --rm --network host -e SAFE_OFFLOAD_DASHBOARDS=/observability \\
        -e SAFE_OFFLOAD_PROMETHEUS=$SAFE_OFFLOAD_PROMETHEUS -e GF_PATHS_PROVISIONING=/observability/provisioning \\
        -v "$here:/observability:ro" grafana/grafana:13.2.3
or import $here/dashboard.json in a Grafana that you have.
MESSAGE
fi
wait

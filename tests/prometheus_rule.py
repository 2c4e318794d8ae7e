"""The PrometheusRule of examples/kubernetes, written from the alerts of examples/observability.

python -m tests.prometheus_rule
"""

import textwrap
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
ALERTS = EXAMPLES / "observability" / "alerts.yaml"
RULE = EXAMPLES / "kubernetes" / "prometheusrule.yaml"
HEAD = """\
# For the Prometheus Operator: the alerts of examples/observability/alerts.yaml. Written by
# `python -m tests.prometheus_rule`. Add the labels that your Prometheus selects rules by.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: safe-offload
  labels: {app.kubernetes.io/name: vllm}
spec:
"""


def rule() -> str:
    """Return the manifest as YAML."""
    alerts = ALERTS.read_text()
    return HEAD + textwrap.indent(alerts[alerts.index("groups:\n") :], "  ")


if __name__ == "__main__":
    RULE.write_text(rule())

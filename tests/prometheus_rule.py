"""The alerts of examples/observability for the Prometheus Operator, as a manifest and in the chart.

python -m tests.prometheus_rule
"""

import textwrap
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
ALERTS = EXAMPLES / "observability" / "alerts.yaml"
RULE = EXAMPLES / "kubernetes" / "prometheusrule.yaml"
IN_CHART = EXAMPLES / "helm" / "safe-offload" / "files" / "alerts.yaml"
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


def groups() -> str:
    """Return the alerts as YAML, without the words above them."""
    alerts = ALERTS.read_text()
    return alerts[alerts.index("groups:\n") :]


def rule() -> str:
    """Return the manifest as YAML."""
    return HEAD + textwrap.indent(groups(), "  ")


if __name__ == "__main__":
    RULE.write_text(rule())
    IN_CHART.write_text(groups())

"""Whether a device may be given work: a policy that is data, a pure judgement, and a monitor with memory."""

from gpurt.health.evidence import Evidence, Finding, findings
from gpurt.health.monitor import HealthMonitor, Transition, Verdict
from gpurt.health.policy import HealthPolicy, XidEffect
from gpurt.health.report import DeviceHealthReport, HealthReport

__all__ = [
    "DeviceHealthReport",
    "Evidence",
    "Finding",
    "HealthMonitor",
    "HealthPolicy",
    "HealthReport",
    "Transition",
    "Verdict",
    "XidEffect",
    "findings",
]

"""What the service answers with, as dataclasses.

Fields are those of the REST interface (api/openapi.yaml), with the same units:
they stand last in the names. ``class_name`` is the interface's ``class``, a word
that Python keeps for itself. Times are in UTC.
"""

from __future__ import annotations

from .audit import Admission, Audit, Hold, Release, Score
from .columns import Column
from .pools import Instance, Policy, Pool, WeightInstance, WeightUpdate
from .runs import (
    Backlog, Batch, ClassBacklog, ClassMetrics, ClassMixture, ClassPace, ClassShare, ContractVersion, Metrics, Mixture, MixtureSpan, Pace,
    RunInfo,
)
from .samples import USABLE, Consumer, Sample, SamplePage, Segment, Sequence, Times, Usage, page_of, sample_of
from .sessions import Delivery, Event, EventPage, HarnessTurn, History, SessionInfo, SessionPage, Turn, TurnPage, turn_of

__all__ = [
    "USABLE", "Admission", "Audit", "Backlog", "Batch", "ClassBacklog", "ClassMetrics", "ClassMixture", "ClassPace",
    "ClassShare", "Column", "Consumer", "ContractVersion", "Delivery", "Event", "EventPage", "HarnessTurn", "History", "Hold", "Instance",
    "Metrics", "Mixture", "MixtureSpan", "Pace", "Policy", "Pool", "Release", "RunInfo", "Sample", "SamplePage", "Score",
    "Segment", "Sequence", "SessionInfo", "SessionPage", "Times", "Turn", "TurnPage", "Usage", "WeightInstance", "WeightUpdate",
    "page_of", "sample_of", "turn_of",
]

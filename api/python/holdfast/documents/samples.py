"""Samples, pages of them, and their readers."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, List, Optional

from .. import _decode
from ..tokens import FloatArray, IntArray, NumpyTokens, TokenArrays
from ._fields import class_field
from .columns import Column


@dataclass
class Usage:
    """What a session used of the engines, over all its turns."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    rewrites: int = 0
    """How often a harness rewrote its history: the sample has one sequence more."""
    earlier_tokens: int = 0
    """Lengths of the sequences that rewrites left, summed; context_tokens is that of the last one."""
    token_seconds: float = 0.0
    resumes: int = 0
    """Model calls that went on from the partial output of one that was cut."""
    tokens_regenerated: int = 0
    """Sampled again because an earlier copy was lost; not part of output_tokens."""


@dataclass
class Times:
    """Where a session's time went."""

    held_seconds: float = 0.0
    residency_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tool_seconds: float = 0.0
    score_seconds: float = 0.0


@dataclass
class Segment:
    """A stretch of a sequence's tokens. ``kind`` is prompt, appended, generated or kept."""

    kind: str
    turn: int
    start: int
    count: int
    policy_version: int
    """Weights that generated the tokens; for other kinds those of the turn that read them."""


@dataclass
class Sequence:
    """One context of a session, trainable by itself: ids, mask and log-probabilities of equal length.

    A sample has one, unless its harness rewrote its history. A token has a mask of
    1 in the one sequence in whose context the policy sampled it.
    """

    kept_tokens: int = 0
    """How many of its first tokens are those of the sequence before it."""
    segments: List[Segment] = field(default_factory=list)
    tokens: Optional[TokenArrays] = field(default=None, init=False, repr=False, compare=False)
    """None if the sample was read without tokens."""

    @property
    def token_ids(self) -> IntArray:
        """int32: the whole context in order. LookupError if read without tokens."""
        return self._arrays().token_ids

    @property
    def loss_mask(self) -> IntArray:
        """uint8: 1 where the policy generated the token."""
        return self._arrays().loss_mask

    @property
    def logprobs(self) -> Optional[FloatArray]:
        """float32: of generated tokens, 0 elsewhere; None if none were asked for."""
        return self._arrays().logprobs

    def numpy(self) -> NumpyTokens:
        """The three arrays as numpy's, sharing memory. ImportError without numpy."""
        return self._arrays().numpy()

    @property
    def prompt_count(self) -> int:
        """Tokens of the prompt, which stand first; all others are the response."""
        count = 0
        for segment in self.segments:
            if segment.kind not in ("prompt", "kept"):
                break
            count += segment.count
        return count

    def _arrays(self) -> TokenArrays:
        if self.tokens is None:
            raise LookupError("the sample was read without tokens")
        return self.tokens


USABLE = ("completed", "truncated")
"""Statuses of samples that are for training."""


@dataclass
class Sample:
    """The finished product of one session, whatever became of it.

    ``id`` is stable: count by it, since delivery is at least once. Only those
    that are ``usable`` are for training; a failure never has a reward of 0.
    """

    id: str
    seq: int
    cursor: str
    run: str
    batch: str
    task: str
    """Common to the members of a group."""
    task_id: str
    """The trainer's own name for the task."""
    member: int
    group_size: int
    """Members that the task asked for."""
    class_name: str = class_field()
    group_members: int = 0
    """Members released for the group so far, spare and refilled ones included."""
    group_outcome: str = ""
    """complete, partial or ended; empty while it is not known."""
    status: str = ""
    policy_version: int = 0
    """Of the release."""
    min_policy_version: int = 0
    max_policy_version: int = 0
    staleness: int = 0
    """Versions that the pool was ahead of min_policy_version when the session ended."""
    usage: Usage = field(default_factory=Usage)
    times: Times = field(default_factory=Times)
    instances: List[str] = field(default_factory=list)
    released_at: Optional[datetime] = None
    first_admitted_at: Optional[datetime] = None
    ended_at: Optional[datetime] = None
    finish_reason: str = ""
    problem: str = ""
    reward: Optional[float] = None
    score_detail: Any = None
    metadata: Any = None
    segments: List[Segment] = field(default_factory=list)
    """Of the one sequence; empty if there are several."""
    columns: List[Column] = field(default_factory=list)
    """Further arrays that were given with the sample."""
    sequences: List[Sequence] = field(default_factory=list)
    """One, or more if the harness rewrote its history, oldest first; none if read without tokens."""

    @property
    def usable(self) -> bool:
        """Whether the sample is for training."""
        return self.status in USABLE

    @property
    def token_ids(self) -> IntArray:
        """int32: the whole context in order. LookupError if read without tokens, or if there are several sequences."""
        return self._only().token_ids

    @property
    def loss_mask(self) -> IntArray:
        """uint8: 1 where the policy generated the token."""
        return self._only().loss_mask

    @property
    def logprobs(self) -> Optional[FloatArray]:
        """float32: of generated tokens, 0 elsewhere; None if none were asked for."""
        return self._only().logprobs

    def numpy(self) -> NumpyTokens:
        """The three arrays as numpy's, sharing memory. ImportError without numpy."""
        return self._only().numpy()

    @property
    def prompt_count(self) -> int:
        """Tokens of the prompt, which stand first; all others are the response."""
        return self._only().prompt_count

    def _only(self) -> Sequence:
        if not self.sequences:
            raise LookupError(f"sample {self.id} was read without tokens")
        if len(self.sequences) > 1:
            # None of them may be lost unseen.
            raise LookupError(f"sample {self.id} has {len(self.sequences)} sequences, since its harness rewrote its history: train on each of sample.sequences")
        return self.sequences[0]


def sample_of(document: Any) -> Sample:
    """Read a sample; its tokens stay encoded until they are asked for."""
    sample = _decode.decode(Sample, document)
    if sample.sequences:
        for sequence, given in zip(sample.sequences, document["sequences"]):
            sequence.tokens = _tokens_of(given)
    elif sample.segments or "packed" in document or "tokens" in document:
        sample.sequences = [Sequence(0, sample.segments)]
        sample.sequences[0].tokens = _tokens_of(document)
    return sample


def _tokens_of(document: Any) -> Optional[TokenArrays]:
    if document.get("packed") is not None:
        return TokenArrays(document["packed"], packed=True)
    if document.get("tokens") is not None:
        return TokenArrays(document["tokens"], packed=False)
    return None


@dataclass
class SamplePage:
    """A piece of a run's samples in completion order."""

    samples: List[Sample]
    next: str
    """Continues after this page, also when it is empty."""
    more: bool
    """A further page is ready now."""


def page_of(document: Any) -> SamplePage:
    """Read a page of samples."""
    page = _decode.decode(_Page, document)
    return SamplePage([sample_of(one) for one in page.samples], page.next, page.more)


@dataclass
class _Page:
    samples: List[Any]
    next: str
    more: bool


@dataclass
class Consumer:
    """A reader's place in a run's samples."""

    run: str
    consumer: str
    delivered: str
    delivered_seq: int
    acknowledged: str
    acknowledged_seq: int
    updated_at: datetime
    start_seq: int = 0
    """Where it began, if not at the beginning: what is before was never given to it."""
    groups: str = ""
    """whole if it reads whole groups: its places count samples in that order then."""

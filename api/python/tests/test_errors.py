"""Problem documents become exceptions that say what to do."""

import email.utils
import json
import pickle
import time
import unittest

import holdfast
from holdfast.errors import problem_of

PROBLEM = {"content-type": "application/problem+json; charset=utf-8"}

KINDS = [
    (400, "invalid-json", holdfast.InvalidJSONError), (422, "invalid-request", holdfast.InvalidRequestError),
    (422, "unknown-class", holdfast.UnknownClassError), (422, "unknown-cursor", holdfast.UnknownCursorError),
    (422, "engine-does-not-answer", holdfast.EngineDoesNotAnswerError), (401, "unauthorized", holdfast.UnauthorizedError),
    (403, "forbidden", holdfast.ForbiddenError), (404, "not-found", holdfast.NotFoundError),
    (405, "method-not-allowed", holdfast.MethodNotAllowedError), (409, "conflict", holdfast.ConflictError),
    (409, "idempotency-key-reused", holdfast.IdempotencyKeyReusedError), (409, "run-ended", holdfast.RunEndedError),
    (409, "limit-reached", holdfast.LimitReachedError),
    (413, "too-large", holdfast.TooLargeError), (415, "unsupported-media-type", holdfast.UnsupportedMediaTypeError),
    (408, "body-timeout", holdfast.BodyTimeoutError), (429, "overloaded", holdfast.OverloadedError),
    (503, "not-owner", holdfast.NotOwnerError), (503, "unavailable", holdfast.UnavailableError),
    (503, "timeout", holdfast.RequestTimeoutError), (503, "stopping", holdfast.StoppingError),
    (500, "internal", holdfast.InternalError),
]


class ProblemTest(unittest.TestCase):
    def test_every_kind_has_its_class(self) -> None:
        for status, kind, expected in KINDS:
            with self.subTest(kind):
                body = json.dumps({"type": f"urn:holdfast:problem:{kind}", "title": "t", "detail": "d", "status": status}).encode()
                self.assertIs(type(problem_of(status, "", PROBLEM, body)), expected)

    def test_a_kind_that_is_not_known_falls_back_to_its_status(self) -> None:
        body = json.dumps({"type": "urn:holdfast:problem:weights-moved", "title": "t", "detail": "d"}).encode()
        self.assertIs(type(problem_of(409, "", PROBLEM, body)), holdfast.ConflictError)
        self.assertIs(type(problem_of(418, "", PROBLEM, body)), holdfast.ProblemError)

    def test_details_and_places_are_kept(self) -> None:
        body = json.dumps({
            "type": "urn:holdfast:problem:unknown-class", "title": "The contract does not declare the class",
            "detail": "body.tasks[1].class: no", "request_id": "abc", "more": 1,
            "errors": [{"location": "body.tasks[1].class", "message": "is not declared", "value": "sft", "offset_bytes": 17}],
        }).encode()
        error = problem_of(422, "", PROBLEM, body)
        self.assertEqual((error.status, error.request_id, error.detail), (422, "abc", "body.tasks[1].class: no"))
        self.assertEqual(error.errors, [holdfast.ErrorDetail("body.tasks[1].class", "is not declared", 17, "sft")])
        self.assertEqual(str(error), "body.tasks[1].class: no (status 422)")

    def test_what_something_in_between_answers_is_shown(self) -> None:
        error = problem_of(502, "Bad Gateway", {"content-type": "text/html"}, b"<h1>nginx</h1>")
        self.assertIs(type(error), holdfast.UnavailableError)
        self.assertIn("nginx", error.detail)

    def test_retry_after_is_seconds_or_a_date(self) -> None:
        def after(text: str) -> "float | None":
            return problem_of(503, "", {"retry-after": text}, b"").retry_after

        self.assertEqual(after("7"), 7.0)
        self.assertIsNone(after(""))
        self.assertIsNone(after("soon"))
        self.assertEqual(after("Thu, 01 Jan 1970 00:00:00 GMT"), 0.0)
        ahead = after(email.utils.formatdate(time.time() + 60, usegmt=True))
        assert ahead is not None
        self.assertTrue(50 < ahead <= 61, ahead)

    def test_exceptions_pass_between_processes(self) -> None:
        body = json.dumps({"type": "urn:holdfast:problem:run-ended", "title": "t", "detail": "d", "errors": [{"location": "a", "message": "b"}]}).encode()
        error = pickle.loads(pickle.dumps(problem_of(409, "", PROBLEM, body)))
        self.assertIs(type(error), holdfast.RunEndedError)
        self.assertEqual(error.errors[0].location, "a")


if __name__ == "__main__":
    unittest.main()

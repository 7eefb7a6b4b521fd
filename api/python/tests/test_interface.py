"""The client's documents beside the service's own description."""

from __future__ import annotations

import dataclasses
import json
import typing
import unittest
import urllib.request
from typing import Set

from holdfast import documents

from . import service


class InterfaceTest(unittest.TestCase):
    def test_every_field_is_in_the_services_own_description(self) -> None:
        with urllib.request.urlopen(service.shared().url + "/api/v1/openapi.json", timeout=300) as answer:
            schemas = json.load(answer)["components"]["schemas"]
        names = {"RunInfo": "Run", "ContractVersion": "Contract", "SessionInfo": "Session"}
        own: Set[str] = {"History", "TokenArrays", "SamplePage", "_Page"}
        checked = 0
        for cls in vars(documents).values():
            if not isinstance(cls, type) or not dataclasses.is_dataclass(cls) or cls.__name__ in own:
                continue
            schema = schemas[names.get(cls.__name__, cls.__name__)]
            fields = {field.metadata.get("json", field.name) for field in dataclasses.fields(cls) if field.init}
            with self.subTest(cls.__name__):
                self.assertEqual(fields - set(schema["properties"]), set())
                hints = typing.get_type_hints(cls)
                for field in dataclasses.fields(cls):
                    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                    if field.init and required:
                        self.assertIn(field.metadata.get("json", field.name), schema["required"])
                        self.assertNotIn(type(None), typing.get_args(hints[field.name]))
            checked += 1
        self.assertGreater(checked, 20)


if __name__ == "__main__":
    unittest.main()

"""The file of tenants: what it may say, and one clear line, without a key, for what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.key_hashes import ApiKeyFileError
from sglang_ext.tenants_file import read_tenants_file
from sglang_ext.types import TenantLimits
from sglang_ext_router.config import RouterConfigError
from support.router_process import FAST
from support.tenants import key_hash

HASH = key_hash("secret")


def test_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(
        f"""
tenants:
  search:
    weight: 3
    concurrency: 32
    requests_per_minute: 600
    tokens_per_minute: 1000000
    max_priority: high
    keys: {{alice: {key_hash("a")}, bob: {key_hash("b").upper()}}}
  batch:
    weight: 0.5
    max_priority: low
    keys:
      nightly: {key_hash("c")}
  empty:
"""
    )
    limits, tenants_by_hash = read_tenants_file(str(file))
    assert limits == {
        "default": TenantLimits("default"),
        "search": TenantLimits("search", 3.0, 32, 600, 1_000_000, "high"),
        "batch": TenantLimits("batch", 0.5, max_priority="low"),
        "empty": TenantLimits("empty"),
    }
    assert tenants_by_hash == {
        bytes.fromhex(key_hash(key)): name for key, name in (("a", "search"), ("b", "search"), ("c", "batch"))
    }


BAD_FILES = [
    ("", "mapping `tenants`"),
    ("tenants: []", "mapping `tenants`"),
    ("tenants: {a: {keys: {}}}", "no tenant has a key"),
    (f"tenants: {{a: {{keys: {{x: {HASH}}}}}}}\nother: 1", "'other'"),
    (f"tenants: {{'a b': {{keys: {{x: {HASH}}}}}}}", "tenant 'a b'"),
    ("tenants: {a: [1]}", "tenant a: its options"),
    (f"tenants: {{a: {{wieght: 1, keys: {{x: {HASH}}}}}}}", "tenant a: there is no option 'wieght'"),
    ("tenants: {a: {weight: 0}}", "tenant a: weight"),
    ("tenants: {a: {weight: -1}}", "tenant a: weight"),
    ("tenants: {a: {weight: .nan}}", "tenant a: weight"),
    ("tenants: {a: {weight: .inf}}", "tenant a: weight"),
    ("tenants: {a: {weight: true}}", "tenant a: weight"),
    ("tenants: {a: {concurrency: -1}}", "tenant a: concurrency"),
    ("tenants: {a: {requests_per_minute: 1.5}}", "tenant a: requests_per_minute"),
    ("tenants: {a: {tokens_per_minute: many}}", "tenant a: tokens_per_minute"),
    ("tenants: {a: {max_priority: urgent}}", "tenant a: max_priority"),
    (f"tenants: {{a: {{keys: {HASH}}}}}", "tenant a: keys must be a mapping"),
    ("tenants: {a: {keys: {x: secret}}}", "tenant a: key x is not a SHA-256"),
    ("tenants: {a: {keys: {x: 12345}}}", "tenant a: key x is not a SHA-256"),
    (f"tenants: {{a: {{keys: {{'x y': {HASH}}}}}}}", "tenant a: the name of a key"),
    (
        f"tenants: {{a: {{keys: {{x: {HASH}}}}}, b: {{keys: {{y: {HASH}}}}}}}",
        "tenant b: key y is the same as key x of tenant a",
    ),
    (f"tenants:\n  a: {{keys: {{x: {HASH}}}}}\n  a: {{}}\n", "'a' stands twice"),
    ("tenants: {a: {weight: 1, weight: 2}}", "'weight' stands twice"),
    ("tenants: [secret\nsecret: }", "not YAML, line 2"),
]


@pytest.mark.parametrize(("text", "says"), BAD_FILES)
def test_a_bad_file_is_one_clear_line_without_a_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    with pytest.raises(ApiKeyFileError) as caught:
        read_tenants_file(str(file))
    message = str(caught.value)
    assert says in message
    assert message.startswith(str(file))
    assert "\n" not in message
    assert "secret" not in message
    assert HASH not in message
    with pytest.raises(RouterConfigError, match="--tenants-file"):
        type(FAST)(tenants_file=str(file))


def test_too_many_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n" + "".join(f"  t{number}: {{}}\n" for number in range(1001)))
    with pytest.raises(ApiKeyFileError, match="1001 tenants"):
        read_tenants_file(str(file))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "binary"):
        with pytest.raises(RouterConfigError, match="--tenants-file"):
            type(FAST)(tenants_file=str(path))

"""A cluster's YAML file: every mistake is one line with the setting's path; writing inverts reading."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.cluster.cluster_file import dump_cluster, load_cluster, read_record, reference_table
from sglang_ext.cluster.config import (
    ClusterConfig,
    ConfigError,
    PoolConfig,
    PoolsConfig,
    RouterSettings,
    StartSettings,
    StopSettings,
)
from support.examples import examples

EXAMPLE = Path(__file__).parents[4] / "examples" / "cluster.yaml"
GOOD = "model: m\npools: {both: {}, decode: {}}\n"


def load(tmp_path: Path, text: str) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def test_the_example_is_valid() -> None:
    config = load_cluster(EXAMPLE)
    assert config.name == "example"
    assert [(str(role), pool.count) for role, pool in config.pools.by_role()] == [
        ("short", 1),
        ("long", 1),
        ("both", 0),
        ("decode", 1),
        ("plain", 0),
    ]
    assert config.pools.short.args == ("--chunked-prefill-size", "512")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pools: {both: {}, decode: {}}", "model: is missing"),
        ("model: m", "pools: is missing"),
        (GOOD + "modle: x", "modle: unknown setting; did you mean 'model'?"),
        (
            "model: m\npools: {both: {}, decode: {cuont: 2}}",
            "pools.decode.cuont: unknown setting; did you mean 'count'?",
        ),
        (
            "model: m\npools: {both: {}, decode: {}, xyz: {}}",
            "pools.xyz: unknown setting; known are short, long, both, decode, plain",
        ),
        ("model: m\npools: {both: {}, decode: {tp: two}}", "pools.decode.tp: must be a whole number, not 'two'"),
        ("model: m\npools: {both: {}, decode: {tp: 1.5}}", "pools.decode.tp: must be a whole number, not 1.5"),
        (
            "model: m\npools: {both: {}, decode: {tp: yes}}",
            "pools.decode.tp: must be a whole number, not true (quote it if text is meant)",
        ),
        ("model: m\npools: {both: {ports: 1}, decode: {}}", "pools.both.ports: must be a list, not 1"),
        (
            "model: m\npools: {both: {args: [{a: 1}]}, decode: {}}",
            "pools.both.args[0]: must be text, not a mapping",
        ),
        ("model: m\npools: {both: {}, decode: {tp: 0}}", "pools.decode.tp: must be at least 1, not 0"),
        ("model: m\npools: {both: {}}", "pools.decode.count: a cluster needs at least one decode instance"),
        ("model: m\npools: 3", "pools: must be a mapping of settings, not 3"),
        ("model:\npools: {both: {}, decode: {}}", "model: must be text, not empty"),
        (GOOD + "start: {timeout_s: soon}", "start.timeout_s: must be a number, not 'soon'"),
        (GOOD + "env: {A: [1]}", "env.A: must be text, not a list"),
    ],
)
def test_mistakes_name_the_setting(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value) == message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file or directory"):
        load_cluster(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"is not valid YAML in line 2, column"):
        load(tmp_path, "model: m\npools: [")
    with pytest.raises(ConfigError, match="must hold a mapping of settings"):
        load(tmp_path, "- a")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_cluster(tmp_path / "latin.yaml")


def test_python_objects_are_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load(tmp_path, "model: !!python/object/apply:os.getcwd []")


def test_numbers_stand_for_text_where_text_is_wanted(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD + "args: [--mem-fraction-static, 0.5]\nenv: {OMP_NUM_THREADS: 1}")
    assert config.args == ("--mem-fraction-static", "0.5")
    assert dict(config.env) == {"OMP_NUM_THREADS": "1"}


WORDS = st.text(string.ascii_letters + string.digits + " -=_/:#{}'\"", min_size=1, max_size=12)
ARGS = st.lists(WORDS, max_size=3).map(tuple)
ENV = st.dictionaries(st.text(string.ascii_uppercase, min_size=1, max_size=5), WORDS, max_size=2)


@st.composite
def pools(draw: st.DrawFn, *, prefill: bool) -> PoolConfig:
    count, tp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return PoolConfig(
        count=count,
        tp=tp,
        pp=draw(st.integers(1, 4)) if prefill else 1,
        dcp=1 if prefill else draw(st.sampled_from([1, tp])),
        ports=(0,) * draw(st.integers(0, count)),
        bootstrap_ports=(0,) * draw(st.integers(0, count if prefill else 0)),
        threads=draw(st.none() | st.integers(1, 8)),
        cores=draw(st.sampled_from([(), ("0-1",) * count])),
        args=draw(ARGS),
        env=draw(ENV),
    )


@st.composite
def clusters(draw: st.DrawFn) -> ClusterConfig:
    return ClusterConfig(
        model=draw(WORDS),
        pools=PoolsConfig(
            short=draw(pools(prefill=True)), both=draw(pools(prefill=True)), decode=draw(pools(prefill=False))
        ),
        name=draw(st.sampled_from(["default", "a.b-c_1"])),
        served_model_name=draw(st.none() | WORDS),
        args=draw(ARGS),
        env=draw(ENV),
        router=RouterSettings(port=draw(st.sampled_from([0, 30000])), args=draw(ARGS)),
        start=StartSettings(timeout_s=draw(st.floats(0.1, 1e6)), parallel=draw(st.none() | st.integers(1, 9))),
        stop=StopSettings(drain_s=draw(st.floats(0.1, 1e6))),
        restart=draw(st.sampled_from(["never", "on-failure"])),
    )


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(clusters())
def test_reading_inverts_writing(config: ClusterConfig) -> None:
    import yaml

    assert read_record(ClusterConfig, yaml.safe_load(dump_cluster(config))) == config


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["model", "pools", "both", "decode", "tp", "args", "env", 3]), inner)
        ),
        max_leaves=12,
    )
)
def test_anything_else_is_refused_in_one_line(value: object) -> None:
    message = ""
    try:
        read_record(ClusterConfig, value)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "cluster-file.md"


def test_the_document_holds_the_table() -> None:
    assert DOCUMENT.read_text(encoding="utf-8").endswith("cluster_file` -->\n" + reference_table())


def test_every_setting_has_a_row() -> None:
    table = reference_table()
    for setting in ("model", "pools.ROLE.worker_args", "router.length_boundary_tokens", "stop.grace_s", "restart"):
        assert table.count(f"| `{setting}` |") == 1

"""What SGLang gets when it asks for the classes of a transfer backend."""

from __future__ import annotations

import pytest

from sglang_ext.sglang_plugin.transfer_backend import OWN_BACKENDS


@pytest.mark.usefixtures("sglang_imported")
@pytest.mark.parametrize("name", OWN_BACKENDS)
def test_our_backends_have_every_class_that_sglang_asks_for(name: str) -> None:
    from sglang.srt.disaggregation.utils import KVClassType

    from sglang_ext.sglang_plugin.hooks.transfer_backends import ExtendedTransferBackend, get_kv_class

    def stock(transfer_backend: object, class_type: object) -> type:
        raise AssertionError("older versions of SGLang refuse what they do not know")

    backend = ExtendedTransferBackend(name)
    classes = [get_kv_class(stock, backend, kind) for kind in KVClassType]
    assert all(isinstance(found, type) for found in classes)

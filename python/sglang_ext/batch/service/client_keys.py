"""The keys of the service's clients: whose a key is, and what its tenant may have."""

from __future__ import annotations

import hmac
import time

from sglang_ext.shared_key import bearer_key
from sglang_ext.tenants_file import TenantKeys
from sglang_ext.types import DEFAULT_TENANT, TenantLimits


class ClientKeys:
    """One key, which is the default tenant's, and the keys of a file of tenants. Without either none is needed."""

    def __init__(self, api_key: str = "", tenants: TenantKeys | None = None) -> None:
        self._api_key = api_key.encode()
        self._tenants = tenants

    def tenant_of(self, authorization: str) -> str | None:
        """Return the tenant whose key an Authorization header holds; None where it holds none that is known."""
        if not self._api_key and self._tenants is None:
            return DEFAULT_TENANT
        # Header values come decoded as Latin-1, also where they were something else.
        given = bearer_key(authorization.encode("latin-1"))
        if self._api_key and hmac.compare_digest(given, self._api_key):
            return DEFAULT_TENANT
        if self._tenants is None or not given:
            return None
        self._tenants.reload(time.monotonic())
        return self._tenants.find(given)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant; a tenant that is not in the file (any more) has the usual ones."""
        if self._tenants is None:
            return TenantLimits(tenant)
        self._tenants.reload(time.monotonic())
        return self._tenants.limits.get(tenant) or TenantLimits(tenant)

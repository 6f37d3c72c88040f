"""What the environment of the user's own process says of a bucket, as the options of its client: by an exact list.

An agent takes options and no variables, and puts nothing into its environment: what an SDK reads there (`AWS_CONFIG_FILE`,
endpoints of metadata services, proxies, executables that give credentials) is what the agent was started with.
"""

from collections.abc import Mapping
from typing import Any

_S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_PROFILE": "profile",
}
_GOOGLE_CREDENTIALS = {"GOOGLE_APPLICATION_CREDENTIALS": "token"}
_AZURE_CREDENTIALS = {
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_CONNECTION_STRING": "connection_string",
    "AZURE_STORAGE_SAS_TOKEN": "sas_token",
    "AZURE_STORAGE_CLIENT_ID": "client_id",
    "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
    "AZURE_STORAGE_TENANT_ID": "tenant_id",
}
_S3_PLACES = {"AWS_ENDPOINT_URL": "endpoint_url", "AWS_ENDPOINT_URL_S3": "endpoint_url"}
_GOOGLE_PLACES = {"GOOGLE_CLOUD_PROJECT": "project"}
_AZURE_PLACES = {"AZURE_STORAGE_ACCOUNT_NAME": "account_name"}
_VARIABLES: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    **dict.fromkeys(("s3", "s3a"), (_S3_CREDENTIALS, _S3_PLACES)),
    **dict.fromkeys(("gs", "gcs"), (_GOOGLE_CREDENTIALS, _GOOGLE_PLACES)),
    **dict.fromkeys(("az", "abfs", "abfss"), (_AZURE_CREDENTIALS, _AZURE_PLACES)),
}
"""Option by variable, for each scheme. No credential is taken where the user has given one, or `anon`; places are taken
each for itself, and the later of two variables for one option holds.
"""
_S3_CLIENT = {"AWS_DEFAULT_REGION": "region_name", "AWS_CA_BUNDLE": "verify"}
"""The same of what s3fs takes in `client_kwargs`."""


def with_environment(scheme: str, given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that a user has given, and what the environment says where none is given.

    fsspec's own variables (FSSPEC_S3_KEY and the like) are options by definition, and go before those of an SDK.
    """
    options = {**_of_fsspec(scheme, environment), **given}
    inner = dict(options.get("client_kwargs") or {})
    credentials, places = _VARIABLES.get(scheme, ({}, {}))
    wanted = {variable: name for variable, name in places.items() if name not in options and name not in inner}
    if options.keys().isdisjoint({*credentials.values(), "anon", "credential"}):
        wanted |= credentials
    options |= {name: environment[variable] for variable, name in wanted.items() if environment.get(variable)}
    if scheme in ("s3", "s3a"):
        found = {name: environment[variable] for variable, name in _S3_CLIENT.items() if environment.get(variable)}
        if found:
            options["client_kwargs"] = {**found, **inner}
    return options


def _of_fsspec(scheme: str, environment: Mapping[str, str]) -> dict[str, Any]:
    names = (f"FSSPEC_{scheme.upper()}", f"FSSPEC_{scheme.upper()}_")
    mine = {name: text for name, text in environment.items() if name == names[0] or name.startswith(names[1])}
    if not mine:
        return {}
    import fsspec.config  # by a process that has such a variable: it costs every start of a process 35 ms

    found: dict[str, dict[str, Any]] = {}
    fsspec.config.set_conf_env(found, mine)
    return found.get(scheme, {})

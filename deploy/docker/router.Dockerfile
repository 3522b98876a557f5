# The router: Python, what it needs, no torch and no engine. Built from the repository's root:
#   docker build -f deploy/docker/router.Dockerfile --build-arg PYTHON_IMAGE=docker.io/library/python:3.11-slim@sha256:... .
# There is no default for the image, so that each build names one by its digest.
ARG PYTHON_IMAGE

FROM ${PYTHON_IMAGE} AS build
# A compiler for what runs for every request.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY LICENSE README.md pyproject.toml hatch_build.py ./
COPY requirements/cpu.lock requirements/
COPY python python
COPY router router
COPY kernels kernels
COPY cuda_graphs cuda_graphs
COPY tools tools
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/source/requirements/cpu.lock
RUN pip wheel --no-deps --wheel-dir /wheel .
# Exact versions of what the wheel asks for.
RUN python -m venv /opt/sglang-ext && /opt/sglang-ext/bin/pip install /wheel/*.whl \
    && /opt/sglang-ext/bin/pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/sglang-ext /opt/sglang-ext
ENV PATH=/opt/sglang-ext/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN sglang-ext router --help > /dev/null
USER 65532:65532
WORKDIR /tmp
CMD ["sglang-ext", "router", "--help"]

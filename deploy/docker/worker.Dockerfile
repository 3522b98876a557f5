# An instance (and the coordinator): SGLang's own image and this package. Built from the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile --build-arg SGLANG_IMAGE=docker.io/lmsysorg/sglang:v0.5.23@sha256:... .
# There is no default for the image, so that each build names one by its digest; SGLang 0.5.22 or 0.5.23.
ARG SGLANG_IMAGE

FROM ${SGLANG_IMAGE} AS build
WORKDIR /source
COPY LICENSE README.md pyproject.toml hatch_build.py ./
COPY python python
COPY router router
COPY kernels kernels
COPY cuda_graphs cuda_graphs
COPY tools tools
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m pip wheel --no-deps --wheel-dir /wheel .

FROM ${SGLANG_IMAGE}
COPY --from=build /wheel /wheel
# What SGLang has brought stays as it is; only what is missing is added.
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check "$(echo /wheel/*.whl)[nixl]" && rm -rf /wheel
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN sglang-ext worker --help > /dev/null && sglang-ext coordinator --help > /dev/null
USER 65532:65532
WORKDIR /tmp
# The base image's would come before the command.
ENTRYPOINT []
CMD ["sglang-ext", "worker", "--help"]

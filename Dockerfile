# An image with the command `paramserve` and torch, for servers and workers:
#   docker build -t paramserve:0.1.0 .
# For servers only, without torch:     --build-arg EXTRAS=
# torch without CUDA, several GB less: --build-arg PIP_EXTRA_INDEX_URL=<index of that wheel>
# deploy/README.md says how it is run.
ARG PYTHON=3.11
ARG EXTRAS=[torch]

FROM python:${PYTHON}-slim AS build
ARG EXTRAS
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/paramserve
COPY pyproject.toml README.md LICENSE constraints.txt /src/
COPY src /src/src
RUN /opt/paramserve/bin/pip install -c /src/constraints.txt "/src${EXTRAS}" \
    && /opt/paramserve/bin/pip check
# For the type of processor that this is built on: on another one, pods compile what they need.
RUN /opt/paramserve/bin/paramserve warm

FROM python:${PYTHON}-slim
LABEL org.opencontainers.image.title="paramserve" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 paramserve \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin paramserve
COPY --from=build /opt/paramserve /opt/paramserve
# Kernels that were not compiled above go to NUMBA_CACHE_DIR: the package's own folder belongs to
# root. /tmp has no other users here; on a shared machine name a folder that only yours can make.
ENV PATH=/opt/paramserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/tmp/numba
USER 10001:10001
WORKDIR /home/paramserve
EXPOSE 5555
ENTRYPOINT ["paramserve"]
CMD ["--help"]

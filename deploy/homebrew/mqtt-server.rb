# A formula for a tap of one's own; it builds from the source of a release. After a release, put its tag and the checksum of its
# archive here: curl -L URL | sha256sum.
class MqttServer < Formula
  desc "MQTT gateway for devices with a typed gRPC API for backends"
  homepage "https://github.com/OWNER/mqtt-server"
  url "https://github.com/OWNER/mqtt-server/archive/refs/tags/v0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "Apache-2.0"

  depends_on "pkgconf" => :build
  depends_on "rust" => :build
  # For connections to Kafka alone.
  depends_on "openssl@3"

  def install
    system "cargo", "install", "--locked", "--profile", "dist", "--features", "shipped",
           *std_cargo_args(path: ".").reject { |arg| arg == "--locked" }
    generate_completions_from_executable(bin/"mqtt-server", "ctl", "completion")
    system bin/"mqtt-server", "ctl", "man", man1
    pkgetc.install "deploy/deb/mqtt-server.toml"
    inreplace pkgetc/"mqtt-server.toml", "/var/lib/mqtt-server", var/"lib/mqtt-server"
    inreplace pkgetc/"mqtt-server.toml", "/etc/mqtt-server", pkgetc
    doc.install "docs/mqtt-server.toml"
  end

  def post_install
    (var/"lib/mqtt-server").mkpath
  end

  service do
    run [opt_bin/"mqtt-server", "--config", etc/"mqtt-server/mqtt-server.toml"]
    keep_alive crashed: true
    working_dir var/"lib/mqtt-server"
    log_path var/"log/mqtt-server.log"
    error_log_path var/"log/mqtt-server.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mqtt-server --version")
    (testpath/"t.toml").write "addr = \"127.0.0.1:#{free_port}\"\nnon_tls = true\ndata_dir = \"#{testpath}/data\"\n"
    assert_match "configuration is valid", shell_output("#{bin}/mqtt-server --check --config #{testpath}/t.toml")
  end
end

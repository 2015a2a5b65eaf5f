//! Files with secrets, and the one rule about who else may read them.
//!
//! Others than the owner must not, but for the group of a file of root's, which is how a service without root's rights is given a
//! secret. Private keys and secrets in plain text are refused, unless `tls.open_key_files` is set; files of hashes, which have to
//! be guessed first, cause a warning.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use config::{Config, ConfigError, Problem};

/// The mode of a file that others can read, if they can.
pub fn open_mode(meta: &Metadata) -> Option<u32> {
    let mode = meta.mode() & 0o777;
    let barred = if meta.uid() == 0 { 0o037 } else { 0o077 };
    (mode & barred != 0).then_some(mode)
}

/// Looks at every file with secrets that the configuration names; one that is not there is told of by who reads it. Returns
/// warnings.
///
/// # Errors
/// Each file with a secret in plain text that others can read, with its key and the command that closes it.
pub fn check(config: &Config) -> Result<Vec<String>, ConfigError> {
    let mut problems = Vec::new();
    let mut warnings = Vec::new();
    for (key, path) in plain(config) {
        let Some(mode) = mode_of(path) else { continue };
        if config.tls.open_key_files {
            warnings.push(warning(&key, path, mode));
            continue;
        }
        let text = format!("others than its owner can read it (mode {mode:04o})");
        let fix = format!(
            "run 'chmod 600 {}', or set tls.open_key_files where a container's mount decides the mode",
            path.display()
        );
        problems.push(Problem::new(key, path.display(), text, fix));
    }
    let hashes =
        [("auth.password_file", &config.auth.password_file), ("backends.tokens", &config.backends.tokens)];
    for (key, path) in hashes {
        let open = path.as_deref().and_then(|path| Some(warning(key, path, mode_of(path)?)));
        warnings.extend(open);
    }
    if problems.is_empty() { Ok(warnings) } else { Err(ConfigError(problems)) }
}

/// Files with secrets in plain text, private keys of bridges and hooks among them; those of listeners and of the database are
/// read with their certificates.
fn plain(config: &Config) -> Vec<(String, &Path)> {
    let grpc = &config.auth.grpc;
    let mut named = vec![
        ("auth.jwt.secret_file".to_owned(), &config.auth.jwt.secret_file),
        ("auth.grpc.key".to_owned(), &grpc.key),
        ("auth.grpc.token_file".to_owned(), &grpc.token_file),
        ("database.password_file".to_owned(), &config.database.password_file),
    ];
    for (name, bridge) in &config.bridges {
        let key = |kind: &str, key: &str| format!("bridges.{name}.{kind}.{key}");
        if let Some(mqtt) = &bridge.mqtt {
            named.extend([
                (key("mqtt", "key"), &mqtt.key),
                (key("mqtt", "password_file"), &mqtt.password_file),
            ]);
        }
        if let Some(webhook) = &bridge.webhook {
            named.extend([
                (key("webhook", "key"), &webhook.key),
                (key("webhook", "secret_file"), &webhook.secret_file),
                (key("webhook", "token_file"), &webhook.token_file),
            ]);
        }
        if let Some(kafka) = &bridge.kafka {
            named.extend([
                (key("kafka", "cert_key"), &kafka.cert_key),
                (key("kafka", "password_file"), &kafka.password_file),
            ]);
        }
    }
    named.into_iter().filter_map(|(key, path)| Some((key, path.as_deref()?))).collect()
}

fn mode_of(path: &Path) -> Option<u32> {
    open_mode(&fs::metadata(path).ok()?)
}

fn warning(key: &str, path: &Path, mode: u32) -> String {
    let path = path.display();
    format!("{key}: others than its owner can read {path} (mode {mode:04o}); run 'chmod 600 {path}'")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use config::{Bridge, KafkaBridge, MqttBridge, WebhookBridge};

    /// The failure: a file with a secret, wherever the configuration names it, is read by everybody on the machine.
    #[test]
    fn every_file_with_secrets_that_others_can_read_is_refused_or_told_of() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, "secret").unwrap();
            Some(path)
        };
        let mut config = Config::default();
        config.auth.password_file = file("hashes");
        config.backends.tokens = file("tokens");
        config.auth.jwt.secret_file = file("jwt");
        config.auth.grpc.key = file("grpc.key");
        config.auth.grpc.token_file = file("grpc.token");
        config.database.password_file = file("database");
        let mqtt =
            MqttBridge { key: file("m.key"), password_file: file("m.password"), ..MqttBridge::default() };
        let webhook = WebhookBridge {
            key: file("w.key"),
            secret_file: file("w.secret"),
            token_file: file("w.token"),
            ..WebhookBridge::default()
        };
        let kafka = KafkaBridge {
            cert_key: file("k.key"),
            password_file: file("k.password"),
            ..KafkaBridge::default()
        };
        let bridge =
            Bridge { mqtt: Some(mqtt), webhook: Some(webhook), kafka: Some(kafka), ..Bridge::default() };
        config.bridges.insert("b".to_owned(), bridge);
        let change = |mode: u32| {
            for entry in fs::read_dir(dir.path()).unwrap() {
                fs::set_permissions(entry.unwrap().path(), fs::Permissions::from_mode(mode)).unwrap();
            }
        };
        for mode in [0o644, 0o604, 0o602] {
            change(mode);
            let ConfigError(problems) = check(&config).unwrap_err();
            let mut keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
            keys.sort_unstable();
            let expected = [
                "auth.grpc.key",
                "auth.grpc.token_file",
                "auth.jwt.secret_file",
                "bridges.b.kafka.cert_key",
                "bridges.b.kafka.password_file",
                "bridges.b.mqtt.key",
                "bridges.b.mqtt.password_file",
                "bridges.b.webhook.key",
                "bridges.b.webhook.secret_file",
                "bridges.b.webhook.token_file",
                "database.password_file",
            ];
            assert_eq!(keys, expected);
            assert!(problems.iter().all(|problem| problem.fix.contains("chmod 600")), "{problems:?}");
        }
        config.tls.open_key_files = true;
        assert_eq!(check(&config).unwrap().len(), 13);
        config.tls.open_key_files = false;
        change(0o600);
        assert_eq!(check(&config).unwrap(), [""; 0]);
        let closed = |name: &str| {
            let open = fs::Permissions::from_mode(0o644);
            fs::set_permissions(dir.path().join(name), open).unwrap();
            let told = check(&config).unwrap();
            change(0o600);
            told
        };
        for (name, key) in [("hashes", "auth.password_file: "), ("tokens", "backends.tokens: ")] {
            let told = closed(name);
            assert!(
                told.len() == 1 && told[0].starts_with(key) && told[0].contains("(mode 0644)"),
                "{told:?}"
            );
        }
        fs::remove_file(dir.path().join("jwt")).unwrap();
        assert!(check(&config).is_ok(), "who reads it tells that it is not there");
    }
}

//! Profiles: gateways by name, in `mqtt-server/ctl.toml` of the user's configuration directory.

use std::{
    collections::BTreeMap,
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
};

use mqtt_gateway_client::{Client, Options};
use serde::{Deserialize, Serialize};

use crate::{GatewayAddress, failure::Failure};

/// Address at which `mqtt-server --dev` listens, and the CA that it makes.
const DEV_ADDRESS: &str = "https://localhost:10000";
const DEV_CA: &str = "certs/ca.crt";

/// The file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Profiles {
    /// The one that is used when none is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    #[serde(default)]
    pub(crate) profiles: BTreeMap<String, Profile>,
}

/// A gateway, and who asks it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Profile {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) addr: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) server_name: Option<String>,
}

impl Profile {
    /// Takes the options of the command line, with files by their whole path: the profile is used from anywhere.
    pub(crate) fn of(connection: &GatewayAddress) -> Result<Self, Failure> {
        let whole = |path: &Option<PathBuf>| path.as_ref().map(std::path::absolute).transpose();
        let token = match connection.token.as_deref().map(|token| (token.strip_prefix('@'), token)) {
            Some((Some(file), _)) => Some(format!("@{}", std::path::absolute(file)?.display())),
            Some((None, token)) => Some(token.to_owned()),
            None => None,
        };
        Ok(Self {
            addr: connection.addr.clone(),
            ca: whole(&connection.ca)?,
            token,
            cert: whole(&connection.cert)?,
            key: whole(&connection.key)?,
            server_name: connection.server_name.clone(),
        })
    }
}

/// The file's path: `$XDG_CONFIG_HOME`, else `~/.config`.
pub(crate) fn path() -> Result<PathBuf, Failure> {
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || set("HOME").map(|home| home.join(".config"));
    let base = set("XDG_CONFIG_HOME").or_else(home);
    let base = base
        .ok_or_else(|| Failure::Usage("no directory for profiles: set HOME or XDG_CONFIG_HOME".to_owned()))?;
    Ok(base.join("mqtt-server").join("ctl.toml"))
}

/// The profiles; none if there is no file.
pub(crate) fn read(path: &Path) -> Result<Profiles, Failure> {
    match fs::read_to_string(path) {
        Ok(text) => toml::from_str(&text).map_err(|error| {
            Failure::Usage(format!("{}: {}; mend it or remove it", path.display(), error.message()))
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Profiles::default()),
        Err(error) => Err(Failure::Usage(format!("read {}: {error}", path.display()))),
    }
}

/// Writes the file in one step; nobody else may read it, since there may be tokens in it.
pub(crate) fn write(path: &Path, profiles: &Profiles) -> Result<(), Failure> {
    let wrong = |error: io::Error| Failure::Local(format!("write {}: {error}", path.display()));
    let text = toml::to_string(profiles).map_err(|error| Failure::Local(error.to_string()))?;
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(wrong)?;
    }
    let new = path.with_extension("toml.new");
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&new).map_err(wrong)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(wrong)?;
    fs::rename(&new, path).map_err(wrong)
}

/// Collects the options of the connection: from the command line, then the environment, then the profile, then the
/// gateway of `--dev`.
pub(crate) fn options(connection: &GatewayAddress) -> Result<Options, Failure> {
    let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let named = connection.profile.clone().or_else(|| env("MQTTCTL_PROFILE"));
    let (addr, ca) = (connection.addr.clone().or_else(|| env("MQTTCTL_ADDR")), connection.ca.clone());
    let ca = ca.or_else(|| env("MQTTCTL_CA").map(PathBuf::from));
    let profile = match named {
        Some(name) => {
            let path = path()?;
            let unknown = || {
                Failure::Usage(format!(
                    "no profile {name} in {}; 'mqtt-server ctl profile list' shows them",
                    path.display()
                ))
            };
            read(&path)?.profiles.remove(&name).ok_or_else(unknown)?
        }
        // An address on the command line is another gateway than the current one: its token is not for that.
        None if addr.is_some() => Profile::default(),
        None => path().ok().map(|path| read(&path)).transpose()?.map_or_else(Profile::default, |mut all| {
            all.current.take().and_then(|name| all.profiles.remove(&name)).unwrap_or_default()
        }),
    };
    let addr = addr.or(profile.addr).unwrap_or_else(|| DEV_ADDRESS.to_owned());
    let ca = ca.or(profile.ca);
    // The CA of --dev is for gateways of this machine; another one may have a certificate that the system trusts.
    let ca = ca.or_else(|| (here(&addr) && Path::new(DEV_CA).exists()).then(|| DEV_CA.into()));
    let mut options = Client::at(addr.clone());
    if let Some(ca) = ca {
        options = options.ca_file(ca)?;
    }
    let file = |given: &Option<PathBuf>, variable: &str, kept: Option<PathBuf>| {
        given.clone().or_else(|| env(variable).map(PathBuf::from)).or(kept)
    };
    match (
        file(&connection.cert, "MQTTCTL_CERT", profile.cert),
        file(&connection.key, "MQTTCTL_KEY", profile.key),
    ) {
        (Some(cert), Some(key)) => options = options.identity_files(cert, key)?,
        (None, None) => {}
        _ => {
            return Err(Failure::Usage(
                "a client certificate needs its private key, and a key its certificate: --cert and --key, or MQTTCTL_CERT and MQTTCTL_KEY"
                    .to_owned(),
            ));
        }
    }
    if let Some(name) = connection.server_name.clone().or(profile.server_name) {
        options = options.server_name(name);
    }
    if let Some(token) = connection.token.clone().or_else(|| env("MQTTCTL_TOKEN")).or(profile.token) {
        let token = match token.strip_prefix('@') {
            Some(file) => {
                fs::read_to_string(file).map_err(|error| Failure::Usage(format!("read {file}: {error}")))?
            }
            None => token,
        };
        options = options.token(&token)?;
    }
    Ok(options)
}

/// Returns whether an address is one of this machine alone.
fn here(addr: &str) -> bool {
    let host = addr.split_once("://").map_or(addr, |(_, rest)| rest);
    let host = host.split('/').next().unwrap_or_default();
    let host = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((v6, _)) => v6,
        None => host.rsplit_once(':').map_or(host, |(host, _)| host),
    };
    host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_authority_of_dev_is_for_gateways_of_this_machine_alone() {
        for addr in
            ["https://localhost:10000", "https://127.0.0.1:1", "https://[::1]:10000/", "https://localhost"]
        {
            assert!(here(addr), "{addr}");
        }
        for addr in
            ["https://gw.example:10000", "https://localhost.example:1", "https://192.0.2.1:1", "", "::"]
        {
            assert!(!here(addr), "{addr}");
        }
    }

    #[test]
    fn profiles_survive_being_written_and_read() {
        let mut all = Profiles { current: Some("work".to_owned()), ..Profiles::default() };
        let profile = Profile {
            addr: Some("https://gw:10000".to_owned()),
            ca: Some("/ca.crt".into()),
            ..Profile::default()
        };
        all.profiles.insert("work".to_owned(), profile);
        let text = toml::to_string(&all).unwrap();
        let read: Profiles = toml::from_str(&text).unwrap();
        assert_eq!(read.profiles["work"].ca, Some("/ca.crt".into()));
        assert!(toml::from_str::<Profiles>("[profiles.a]\nadress = 'x'").is_err());
    }
}

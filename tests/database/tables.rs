//! Contents of the tables, asked of Cassandra itself.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use scylla::{
    client::{
        execution_profile::ExecutionProfile,
        session::{Session, TlsContext},
        session_builder::SessionBuilder,
    },
    policies::host_filter::AllowListHostFilter,
    statement::Consistency,
};
use tokio::runtime::{Builder, Runtime};

use crate::load::Sent;

/// Longer than anything may take on a loaded machine; only a failing test waits so long.
const LIMIT: Duration = Duration::from_secs(120);

/// For all that the tests themselves do over gRPC and CQL.
pub(crate) static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime"));

/// Asks again until there is an answer; a failure says what was missing last.
pub(crate) fn wait_for<T>(what: &str, ask: impl FnMut() -> Result<T, String>) -> T {
    wait_within(LIMIT, what, ask)
}

#[expect(clippy::disallowed_methods, reason = "waiting for other processes needs the real clock")]
fn wait_within<T>(limit: Duration, what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
    let begin = Instant::now();
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(missing) => assert!(begin.elapsed() < limit, "{what}: not after {limit:?}: {missing}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A keyspace of the test's own.
pub(crate) fn keyspace() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("test_{}_{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

/// Login to a Cassandra that does not let everybody in.
pub(crate) struct Login<'a> {
    pub(crate) name: &'a str,
    pub(crate) password: &'a str,
    /// PEM file of the authority; without it no TLS.
    pub(crate) ca: Option<&'a Path>,
}

/// TLS to whoever has a certificate of this authority.
fn trusting(ca: &Path) -> Arc<rustls::ClientConfig> {
    let pem = fs::read(ca).expect("read the authority");
    let mut roots = rustls::RootCertStore::empty();
    for certificate in rustls_pemfile::certs(&mut pem.as_slice()) {
        roots.add(certificate.expect("a certificate")).expect("an authority");
    }
    Arc::new(rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

fn connect(builder: &SessionBuilder) -> Session {
    wait_for("a connection to Cassandra", || {
        RUNTIME.block_on(builder.build()).map_err(|error| error.to_string())
    })
}

pub(crate) struct Tables {
    session: Session,
    keyspace: String,
}

impl Tables {
    /// Opens the tables of this keyspace, which is dropped in the end.
    pub(crate) fn open_keyspace(address: &str, keyspace: &str) -> Self {
        let mut tables = Self::open(address, None);
        tables.keyspace = keyspace.to_owned();
        tables
    }

    /// Waits until the database takes a connection; the keyspace is new.
    pub(crate) fn open(address: &str, login: Option<&Login<'_>>) -> Self {
        let ca = login.and_then(|login| login.ca);
        let mut builder = SessionBuilder::new()
            .known_nodes(address.split(','))
            .tls_context(ca.map(|ca| TlsContext::Rustls023(trusting(ca))));
        if let Some(login) = login {
            builder = builder.user(login.name, login.password);
        }
        Self { session: connect(&builder), keyspace: keyspace() }
    }

    /// As this node of several has them, whatever the others do.
    pub(crate) fn of_node(address: &str) -> Self {
        let only = AllowListHostFilter::new([address]).expect("an address");
        let profile = ExecutionProfile::builder().consistency(Consistency::One).build();
        let builder = SessionBuilder::new()
            .known_node(address)
            .host_filter(Arc::new(only))
            .default_execution_profile_handle(profile.into_handle());
        Self { session: connect(&builder), keyspace: keyspace() }
    }

    pub(crate) fn keyspace(&self) -> &str {
        &self.keyspace
    }

    /// Tells whether the database lists this table.
    pub(crate) fn list(&self, table: &str) -> Result<(), String> {
        let text = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?";
        let found = RUNTIME.block_on(self.session.query_unpaged(text, (&self.keyspace, table)));
        let rows = found
            .map_err(|error| error.to_string())?
            .into_rows_result()
            .map_err(|error| error.to_string())?;
        if rows.rows_num() > 0 { Ok(()) } else { Err(format!("no {table}")) }
    }

    /// The payloads of a device by topic. An error also if there is no such table.
    pub(crate) fn of_device(&self, device: &str) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let text = format!("SELECT topic, payload FROM {}.latest_by_device WHERE device = ?", self.keyspace);
        let answer = RUNTIME.block_on(self.session.query_unpaged(text, (device,)));
        let rows = answer.map_err(|error| error.to_string())?.into_rows_result();
        let rows = rows.map_err(|error| error.to_string())?;
        let all: Result<_, _> =
            rows.rows::<(String, Vec<u8>)>().map_err(|error| error.to_string())?.collect();
        all.map_err(|error| error.to_string())
    }

    /// Device and payload of the newest value of a topic.
    fn of_topic(&self, topic: &str) -> Result<Option<(String, Vec<u8>)>, String> {
        let text = format!("SELECT device, payload FROM {}.latest_by_topic WHERE topic = ?", self.keyspace);
        let answer = RUNTIME.block_on(self.session.query_unpaged(text, (topic,)));
        let rows = answer.map_err(|error| error.to_string())?.into_rows_result();
        rows.map_err(|error| error.to_string())?.maybe_first_row().map_err(|error| error.to_string())
    }

    /// Waits until both tables hold what was sent last, and nothing else of these devices.
    pub(crate) fn hold(&self, sent: &Sent) {
        self.hold_within(LIMIT, sent);
    }

    /// As [`Self::hold`], and not longer than `limit`.
    pub(crate) fn hold_within(&self, limit: Duration, sent: &Sent) {
        wait_within(limit, "the last values in the tables", || self.agree(sent));
    }

    /// Checks that both tables hold the values sent last. The error is a difference.
    pub(crate) fn agree(&self, sent: &Sent) -> Result<(), String> {
        for (device, last) in &sent.by_device {
            let found = self.of_device(device)?;
            if found != *last {
                return Err(difference(device, last, &found));
            }
        }
        for (topic, newest) in &sent.by_topic {
            let found = self.of_topic(topic)?;
            if found.as_ref() != Some(newest) {
                return Err(format!("newest of {topic}: {newest:?} sent, {found:?} found"));
            }
        }
        Ok(())
    }

    /// Cassandra may fail once or twice at it while others write.
    pub(crate) fn drop_keyspace(&self) {
        let text = format!("DROP KEYSPACE IF EXISTS {}", self.keyspace);
        wait_for("the end of a keyspace", || {
            let done = RUNTIME.block_on(self.session.query_unpaged(text.as_str(), ()));
            done.map(drop).map_err(|error| error.to_string())
        });
    }

    pub(crate) fn execute(&self, statement: &str) {
        RUNTIME.block_on(self.session.query_unpaged(statement, ())).expect(statement);
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.drop_keyspace();
        }
    }
}

fn difference(device: &str, last: &BTreeMap<String, Vec<u8>>, found: &BTreeMap<String, Vec<u8>>) -> String {
    let shown = |payload: Option<&Vec<u8>>| {
        payload.map(|payload| String::from_utf8_lossy(&payload[..payload.len().min(40)]).trim().to_owned())
    };
    let wrong = last.iter().find(|(topic, payload)| found.get(*topic) != Some(payload));
    match wrong {
        Some((topic, payload)) => {
            format!("{device} {topic}: {:?} sent, {:?} found", shown(Some(payload)), shown(found.get(topic)))
        }
        None => format!("{device}: rows that it has not sent: {:?}", found.keys()),
    }
}

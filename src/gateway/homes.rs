//! Ways to the homes of a cluster: those that are served here, and links to the gateways that serve the others.

use std::{collections::BTreeMap, pin::Pin, sync::Arc};

use ::links::{GatewayLink, LinkAnswer, LinkRequest, LinkTarget, PassedCaller, until_gone};
use auth::abuse::BanRegistry;
use config::{Config, DatabaseTls};
use gateway_core::metrics::MetricRow;
use grpc::LocalService;
use grpc_homes::{HomeWays, NotServed};
use grpc_messages::status::Error;
use net::{DeviceHomes, HomeWay, NetShared};
use parking_lot::{Mutex, RwLock};
use telemetry::ReadRows;
use tokio::{runtime::Handle, sync::watch};

use super::{http::ReadReady, metrics::add};

/// Place of a home, as the ledger has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HomeAddress {
    /// Node that serves it; empty if none does.
    pub node: String,
    /// Address under which backends reach that node; empty if it has not said.
    pub address: String,
    /// Address under which other gateways reach it; empty if it has no links.
    pub link: String,
}

/// A home that is served here.
pub(super) struct HomeHere {
    pub(super) shared: Arc<NetShared>,
    pub(super) api: LocalService,
    pub(super) rows: ReadRows,
    pub(super) ready: ReadReady,
    pub(super) bans: Arc<BanRegistry>,
    /// True once the home is another gateway's.
    pub(super) gone: watch::Receiver<bool>,
}

impl HomeHere {
    /// Answers a call for its caller. `None` if the rights of the caller are not such as this version knows; the answer is none, or breaks
    /// off, if the home goes meanwhile.
    pub(super) fn call(
        &self,
        caller: &PassedCaller,
        request: LinkRequest,
    ) -> Option<impl Future<Output = Option<LinkAnswer>> + Send + use<>> {
        let answer = self.api.passed(caller, request)?;
        let mut gone = self.gone.clone();
        Some(async move {
            let Ok(answer) = tokio::select! {
                biased;
                _ = gone.wait_for(|gone| *gone) => return None,
                answer = answer => answer,
            };
            Some(answer.map(|body| until_gone(body, gone)))
        })
    }
}

/// See the module.
pub(super) struct Homes {
    /// Name of this node.
    node: String,
    here: RwLock<BTreeMap<u16, Arc<HomeHere>>>,
    places: watch::Receiver<Vec<HomeAddress>>,
    /// By the names of the nodes.
    links: Mutex<BTreeMap<String, NodeLink>>,
    /// `None` without links.
    files: Option<DatabaseTls>,
    open_key: bool,
    /// In which links run.
    runtime: Handle,
}

struct NodeLink {
    target: watch::Sender<Option<LinkTarget>>,
    link: Arc<GatewayLink>,
}

impl Homes {
    /// Homes at `places`, now and later, of which none is served here yet. In the runtime in which links are to run.
    pub(super) fn new(config: &Config, node: String, places: watch::Receiver<Vec<HomeAddress>>) -> Arc<Self> {
        let links = &config.cluster.links;
        Arc::new(Self {
            node,
            here: RwLock::default(),
            places,
            links: Mutex::default(),
            files: links.is_on().then(|| links.client_files()),
            open_key: config.tls.open_key_files,
            runtime: Handle::current(),
        })
    }

    /// A home that is served here.
    pub(super) fn here(&self, home: u16) -> Option<Arc<HomeHere>> {
        self.here.read().get(&home).cloned()
    }

    /// All homes that are served here.
    pub(super) fn all_here(&self) -> Vec<Arc<HomeHere>> {
        self.here.read().values().cloned().collect()
    }

    /// A home is served here, from now on or no more.
    pub(super) fn set(&self, home: u16, here: Option<HomeHere>) {
        let mut all = self.here.write();
        match here {
            Some(here) => all.insert(home, Arc::new(here)),
            None => all.remove(&home),
        };
    }

    /// Returns whether calls and devices of some home get there.
    pub(super) fn has_a_way(&self) -> bool {
        let reaches = |home| self.link(home).is_some_and(|link| link.is_reachable());
        !self.here.read().is_empty() || (0..self.count()).any(reaches)
    }

    /// The link to the gateway that serves a home, if that is another one and both have links.
    pub(super) fn link(&self, home: u16) -> Option<Arc<GatewayLink>> {
        let files = self.files.as_ref()?;
        let target = {
            let places = self.places.borrow();
            let HomeAddress { node, link, .. } = places.get(usize::from(home))?;
            if node.is_empty() || link.is_empty() || *node == self.node {
                return None;
            }
            LinkTarget { name: node.clone(), address: link.clone() }
        };
        let mut links = self.links.lock();
        if let Some(found) = links.get(&target.name) {
            found.target.send_if_modified(|known| {
                let is_new = known.as_ref() != Some(&target);
                if is_new {
                    *known = Some(target);
                }
                is_new
            });
            return Some(Arc::clone(&found.link));
        }
        // Nodes that serve nothing any more have none.
        let places = self.places.borrow();
        links.retain(|node, _| places.iter().any(|place| place.node == *node));
        let name = target.name.clone();
        let (target, known) = watch::channel(Some(target));
        let _entered = self.runtime.enter();
        let link = Arc::new(GatewayLink::new(known, files.clone(), self.open_key));
        links.insert(name, NodeLink { target, link: Arc::clone(&link) });
        Some(link)
    }

    /// Rows of `/metrics` of the homes that are served here, and those of the doors before them, added up.
    pub(super) fn rows(&self, doors: Vec<MetricRow>) -> Vec<MetricRow> {
        let mut all: Vec<MetricRow> = Vec::new();
        let mut places = BTreeMap::new();
        let homes = self.all_here();
        for row in homes.iter().flat_map(|here| (here.rows)()).chain(doors) {
            let key = (row.name, row.suffix, row.labels.clone());
            match places.get(&key) {
                Some(place) => add(&mut all[*place], &row),
                None => {
                    places.insert(key, all.len());
                    all.push(row);
                }
            }
        }
        all
    }
}

impl HomeWays for Homes {
    fn count(&self) -> u16 {
        u16::try_from(self.places.borrow().len()).unwrap_or(u16::MAX)
    }

    /// The remainder of the text's CRC-32, which balancers can compute, too.
    fn of(&self, text: &str) -> u16 {
        let hash = crc32fast::hash(text.as_bytes());
        u16::try_from(hash % u32::from(self.count().max(1))).unwrap_or_default()
    }

    fn call(
        &self,
        home: u16,
        caller: &PassedCaller,
        request: LinkRequest,
    ) -> Pin<Box<dyn Future<Output = Result<LinkAnswer, NotServed>> + Send>> {
        if let Some(here) = self.here(home) {
            let answer = here.call(caller, request);
            return Box::pin(async move { answer.ok_or(NotServed)?.await.ok_or(NotServed) });
        }
        let (link, caller) = (self.link(home), caller.clone());
        Box::pin(async move {
            link.ok_or(NotServed)?.call(&caller, home, request).await.map_err(|error| {
                gateway_core::warn_limited!(%error, "a call is not passed on");
                NotServed
            })
        })
    }

    fn own(&self) -> Option<u16> {
        self.here.read().keys().next().copied()
    }

    fn away(&self, home: u16) -> Error {
        let places = self.places.borrow();
        let address = places.get(usize::from(home)).map_or_else(String::new, |place| place.address.clone());
        match places.len() {
            0 | 1 => Error::NotActive { address },
            _ => Error::HomeNotServed { home },
        }
    }
}

impl DeviceHomes for Homes {
    fn way(&self, client_id: &str) -> HomeWay {
        let home = self.of(client_id);
        if let Some(here) = self.here(home) {
            return HomeWay::Here(Arc::clone(&here.shared));
        }
        self.link(home).map_or(HomeWay::Nobody, |link| HomeWay::Elsewhere(home.into(), link))
    }

    fn here(&self, home: u32) -> Option<Arc<NetShared>> {
        let home = u16::try_from(home).ok()?;
        Self::here(self, home).map(|here| Arc::clone(&here.shared))
    }
}

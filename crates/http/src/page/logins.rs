//! Logins: a token that was shown once stays here, and the browser has a random name for it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::http::{
    HeaderMap, HeaderValue,
    header::{COOKIE, HOST, ORIGIN},
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use broker::Account;
use gateway_core::{Timestamp, clock};
use parking_lot::Mutex;
use tokio::sync::watch;
use zeroize::Zeroizing;

use super::tries::Tries;
use crate::counters::count;
use crate::held::{HeldBytes, NoMemory};

/// Most logins at once; one more ends the one that was used least recently. At most 8 KiB each.
const MOST: usize = 256;
/// Longest token that is tried, as the API's own bound.
pub(super) const LONGEST: usize = 8 << 10;
/// Time after which an unused login ends, and longest time of any login.
const IDLE: Duration = Duration::from_hours(1);
pub(super) const LONGEST_LOGIN: Duration = Duration::from_hours(12);
/// Interval at which a live part checks that its login lasts.
const LOOK: Duration = Duration::from_secs(15);
/// The cookie. It is for the pages alone.
const NAME: &str = "gateway_page";

/// Bytes of a login besides its token.
const OVERHEAD: usize = 512;

/// A login.
struct Login {
    token: Arc<Zeroizing<String>>,
    csrf: Arc<str>,
    used: Timestamp,
    until: Timestamp,
    /// The token and its companions, on the memory account.
    _held: HeldBytes,
}

/// Reason to refuse a login.
#[derive(Debug)]
pub(super) enum NoLogin {
    Randomness,
    Memory,
}

/// Login of a request.
#[derive(Clone)]
pub(super) struct PageLogin {
    pub(super) token: Option<Arc<Zeroizing<String>>>,
    /// Token that a form must bring back.
    pub(super) csrf: Arc<str>,
}

/// All logins.
pub(super) struct Logins {
    table: Mutex<HashMap<String, Login>>,
    /// Changes when a login is ended.
    left: watch::Sender<()>,
    account: Arc<Account>,
    pub(super) tries: Tries,
    /// For forms of those who need no login. Others cannot read it: it is in pages of this origin only.
    open: Arc<str>,
}

/// 256 random bits as text; `None` if the system has none to give.
fn random() -> Option<String> {
    let mut bytes = [0; 32];
    aws_lc_rs::rand::fill(&mut bytes).ok()?;
    Some(URL_SAFE_NO_PAD.encode(bytes))
}

impl Logins {
    pub(super) fn new(account: &Arc<Account>) -> Self {
        // Without randomness no form is taken, since nothing compares equal to the empty text.
        let open = random().unwrap_or_default().into();
        let (table, left) = (Mutex::default(), watch::Sender::default());
        Self { table, left, account: Arc::clone(account), tries: Tries::default(), open }
    }

    pub(super) fn open(&self) -> PageLogin {
        PageLogin { token: None, csrf: Arc::clone(&self.open) }
    }

    /// Keeps `token` and answers with the name of the login.
    pub(super) fn add(&self, token: Zeroizing<String>, now: Timestamp) -> Result<String, NoLogin> {
        let fresh = || random().ok_or(NoLogin::Randomness);
        let (id, csrf) = (fresh()?, fresh()?);
        let until = now.plus_millis(LONGEST_LOGIN.as_millis() as u64);
        let mut held = HeldBytes::new(&self.account);
        held.more(token.len() + OVERHEAD).map_err(|NoMemory| NoLogin::Memory)?;
        let login = Login { token: Arc::new(token), csrf: csrf.into(), used: now, until, _held: held };
        let mut table = self.table.lock();
        table.retain(|_, login| login.lasts(now));
        if table.len() >= MOST
            && let Some(oldest) = table.iter().min_by_key(|(_, login)| login.used).map(|(id, _)| id.clone())
        {
            count(|c| c.page_logins_evicted.add(1));
            table.remove(&oldest);
        }
        table.insert(id.clone(), login);
        Ok(id)
    }

    /// The login that the cookie names, which is used by this.
    pub(super) fn find(&self, headers: &HeaderMap, now: Timestamp) -> Option<PageLogin> {
        let mut table = self.table.lock();
        let login = table.get_mut(id(headers)?).filter(|login| login.lasts(now))?;
        login.used = now;
        Some(PageLogin { token: Some(Arc::clone(&login.token)), csrf: Arc::clone(&login.csrf) })
    }

    /// Ends the login that the cookie names.
    pub(super) fn remove(&self, headers: &HeaderMap) {
        if let Some(id) = id(headers) {
            self.table.lock().remove(id);
            self.left.send_replace(());
        }
    }

    /// Waits until the login of this form's secret has ended, and keeps it in use as long: its page is being looked at.
    /// Without a login the wait does not end.
    pub(super) async fn ended(&self, csrf: &str) {
        let mut left = self.left.subscribe();
        while self.is_used(csrf, clock::now()) {
            tokio::select! {
                _ = left.changed() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    fn is_used(&self, csrf: &str, now: Timestamp) -> bool {
        let mut table = self.table.lock();
        let login = table.values_mut().find(|login| *login.csrf == *csrf && login.lasts(now));
        match login {
            Some(login) => login.used = now,
            None => return *self.open == *csrf,
        }
        true
    }
}

impl Login {
    fn lasts(&self, now: Timestamp) -> bool {
        now < self.until && now < self.used.plus_millis(IDLE.as_millis() as u64)
    }
}

fn id(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    cookies
        .flat_map(|value| value.split(';'))
        .find_map(|pair| pair.trim().strip_prefix(NAME)?.strip_prefix('='))
}

/// Returns whether the browser talks TLS, to this listener or to a proxy in front of it.
fn is_tls(encrypted: bool, headers: &HeaderMap) -> bool {
    let says = |name: &str, wanted: &dyn Fn(&str) -> bool| {
        headers.get(name).and_then(|value| value.to_str().ok()).is_some_and(wanted)
    };
    encrypted
        || says("x-forwarded-proto", &|value| value.trim().eq_ignore_ascii_case("https"))
        || says("forwarded", &|value| value.to_ascii_lowercase().contains("proto=https"))
}

pub(super) fn cookie(value: &str, encrypted: bool, headers: &HeaderMap, age: u64) -> HeaderValue {
    let secure = if is_tls(encrypted, headers) { "; Secure" } else { "" };
    let text = format!("{NAME}={value}; Path=/page; HttpOnly; SameSite=Strict; Max-Age={age}{secure}");
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

/// Returns whether a form comes from a page of ours, by the origin that its browser names with every post. A proxy may
/// have changed the host, but names the original one; no other page can make a browser name ours.
pub(super) fn is_own_form(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let Some((_, origin)) = text(ORIGIN.as_str()).and_then(|origin| origin.split_once("://")) else {
        return text("sec-fetch-site") == Some("same-origin");
    };
    [text(HOST.as_str()), text("x-forwarded-host")]
        .into_iter()
        .flatten()
        .any(|host| host.eq_ignore_ascii_case(origin))
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use broker::MemoryKind;

    use super::*;

    fn account() -> Arc<Account> {
        Arc::new(Account::new(1 << 30))
    }

    fn token(text: &str) -> Zeroizing<String> {
        Zeroizing::new(text.to_owned())
    }

    /// Rules out tokens that the memory account knows nothing of, and a login where there is no room for one.
    #[test]
    fn a_login_is_on_the_memory_account_until_it_ends() {
        let account = Arc::new(Account::new(256 << 10));
        let logins = Logins::new(&account);
        let id = logins.add(token(&"t".repeat(1_000)), Timestamp(1)).unwrap();
        assert_eq!(account.held(MemoryKind::Http), 1_000 + OVERHEAD);
        logins.remove(&with(&id));
        assert_eq!(account.held(MemoryKind::Http), 0);
        let refused = (0..MOST).find_map(|_| logins.add(token(&"t".repeat(LONGEST)), Timestamp(1)).err());
        assert!(matches!(refused, Some(NoLogin::Memory)));
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::try_from(*value).unwrap()))
            .collect()
    }

    fn with(id: &str) -> HeaderMap {
        headers(&[("cookie", &format!("other=1; {NAME}={id}"))])
    }

    #[test]
    fn a_login_ends_when_it_is_idle_old_or_left() {
        let logins = Logins::new(&account());
        let start = Timestamp(1_000);
        let id = logins.add(token("secret"), start).unwrap();
        assert!(logins.find(&HeaderMap::new(), start).is_none() && logins.find(&with("x"), start).is_none());
        assert_eq!(logins.find(&with(&id), start).unwrap().token.unwrap().as_str(), "secret");
        let idle = IDLE.as_millis() as u64;
        let later = start.plus_millis(idle - 1);
        assert!(logins.find(&with(&id), later).is_some(), "not idle yet");
        assert!(logins.find(&with(&id), later.plus_millis(idle)).is_none(), "idle");
        let mut now = start;
        while now < start.plus_millis(LONGEST_LOGIN.as_millis() as u64) {
            assert!(logins.find(&with(&id), now).is_some() || now > later);
            now = now.plus_millis(idle / 2);
        }
        assert!(logins.find(&with(&id), now).is_none(), "old");
        let id = logins.add(token("other"), start).unwrap();
        logins.remove(&with(&id));
        assert!(logins.find(&with(&id), start).is_none(), "left");
    }

    /// Live parts went on with the token of a login that had ended.
    #[tokio::test(start_paused = true)]
    async fn a_live_part_ends_with_its_login_and_keeps_it_in_use() {
        let logins = Logins::new(&account());
        let open = logins.open();
        let start = clock::now();
        let id = logins.add(token("secret"), start).unwrap();
        let csrf = logins.find(&with(&id), start).unwrap().csrf;
        let (mut ended, mut never) = (pin!(logins.ended(&csrf)), pin!(logins.ended(&open.csrf)));
        let soon = Duration::from_millis(1);
        assert!(tokio::time::timeout(soon, &mut ended).await.is_err(), "it lasts");
        let idle = start.plus_millis(IDLE.as_millis() as u64 - 1);
        assert!(logins.is_used(&csrf, idle));
        assert!(logins.find(&with(&id), idle.plus_millis(1_000)).is_some(), "somebody looks");
        assert!(!logins.is_used(&csrf, start.plus_millis(LONGEST_LOGIN.as_millis() as u64)));
        logins.remove(&with(&id));
        tokio::time::timeout(soon, &mut ended).await.expect("at once");
        assert!(tokio::time::timeout(soon, &mut never).await.is_err(), "nobody has logged in");
    }

    #[test]
    fn one_login_too_many_ends_the_one_used_least() {
        let logins = Logins::new(&account());
        let at = |n: usize| Timestamp(1_000 + n as u64);
        let ids: Vec<String> = (0..MOST).map(|n| logins.add(token(&n.to_string()), at(n)).unwrap()).collect();
        assert!(logins.find(&with(&ids[0]), at(MOST)).is_some());
        logins.add(token("more"), at(MOST + 1)).unwrap();
        assert_eq!(logins.table.lock().len(), MOST);
        assert!(logins.find(&with(&ids[0]), at(MOST + 2)).is_some(), "was used again");
        assert!(logins.find(&with(&ids[1]), at(MOST + 2)).is_none());
    }

    #[test]
    fn a_form_of_another_origin_is_not_ours() {
        let own = |pairs: &[(&'static str, &str)]| is_own_form(&headers(pairs));
        assert!(own(&[("origin", "http://localhost:9090"), ("host", "localhost:9090")]));
        assert!(own(&[
            ("origin", "https://gw.example"),
            ("host", "10.0.0.1:9090"),
            ("x-forwarded-host", "gw.example")
        ]));
        assert!(own(&[("sec-fetch-site", "same-origin"), ("host", "localhost:9090")]));
        assert!(!own(&[("origin", "http://evil.example"), ("host", "localhost:9090")]));
        assert!(!own(&[("origin", "http://localhost:8000"), ("host", "localhost:9090")]));
        assert!(!own(&[("origin", "null"), ("host", "localhost:9090"), ("sec-fetch-site", "cross-site")]));
        assert!(!own(&[("host", "localhost:9090")]));
    }

    #[test]
    fn a_cookie_is_secure_with_tls_here_or_in_front() {
        let secure = headers(&[("x-forwarded-proto", "https")]);
        let of = |headers: &HeaderMap| cookie("id", false, headers, 60).to_str().unwrap().to_owned();
        assert!(cookie("id", true, &HeaderMap::new(), 60).to_str().unwrap().ends_with("; Secure"));
        assert!(of(&secure).ends_with("; Secure") && !of(&HeaderMap::new()).contains("Secure"));
        assert!(of(&secure).contains("HttpOnly") && of(&secure).contains("SameSite=Strict"));
    }
}

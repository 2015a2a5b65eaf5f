//! A hundred rules with placeholders, groups and conditions, and one device that they concern.

use std::{collections::BTreeMap, fmt::Write as _, hint::black_box};

use access::{
    Method, Principal, Subject,
    rules::{RecentDecisions, Rules},
};
use gateway_core::QoS;

/// More topics than anybody remembers decisions about.
const TOPICS: usize = 1_000;

/// The rules, the device, and topics of which each is allowed by another rule than the first.
pub(crate) struct Ruled {
    rules: Rules,
    principal: Principal,
    topics: Vec<String>,
}

impl Ruled {
    /// Reads the rules.
    pub(crate) fn new() -> Self {
        let mut text = String::from("[groups]\nfitters = { users = [\"fit-*\", \"anna\"] }\n");
        for number in 0..25 {
            let _ = write!(
                text,
                "[[rules]]\ndeny = \"all\"\nusers = [\"guest-{number}-*\"]\ntopics = [\"area/#\"]\n\
                 [[rules]]\nallow = \"publish\"\ntopics = [\"area/{number}/%c/#\", \"log/%c/{number}\"]\nmax_qos = 1\n\
                 [[rules]]\nallow = \"all\"\nclaims = {{ site = \"site-{number}\" }}\ntopics = [\"%{{claim.site}}/line/+/%u\"]\n\
                 [[rules]]\nallow = \"publish\"\ngroups = [\"fitters\"]\ntopics = [\"fit/%u/{number}/+\", \"fit/%cn/#\"]\n"
            );
        }
        let rules = Rules::parse(&text).expect("rules");
        assert_eq!(rules.len(), 100);
        let principal = Principal {
            method: Method::Jwt,
            username: Some("anna".into()),
            claims: BTreeMap::from([("site".into(), ["site-24".into()].into())]),
            ..Principal::default()
        };
        let topics = (0..TOPICS).map(|number| match number % 4 {
            0 => format!("area/{}/device-4711/{number}/t", number % 25),
            1 => format!("log/device-4711/{}", number % 25),
            2 => format!("site-24/line/{number}/anna"),
            _ => format!("fit/anna/{}/{number}", number % 25),
        });
        Self { rules, principal, topics: topics.collect() }
    }

    fn subject(&self) -> Subject<'_> {
        Subject { client_id: "device-4711", listener: "default", principal: &self.principal }
    }

    /// Decides so often about a message, each on another topic: nothing is remembered.
    pub(crate) fn cold(&self, repeats: usize) {
        let (subject, mut recent) = (self.subject(), RecentDecisions::default());
        for topic in self.topics.iter().cycle().take(repeats) {
            let grant = recent.find(black_box(1), black_box(topic), || self.rules.publish(&subject, topic));
            assert_eq!(grant.permits(QoS::AtLeastOnce, false, 100), Ok(()));
        }
    }

    /// Decides so often about a message on one of four topics, which are remembered.
    pub(crate) fn hot(&self, repeats: usize) {
        let (subject, mut recent) = (self.subject(), RecentDecisions::default());
        for topic in self.topics[..4].iter().cycle().take(repeats) {
            let grant = recent.find(black_box(1), black_box(topic), || self.rules.publish(&subject, topic));
            assert_eq!(grant.permits(QoS::AtLeastOnce, false, 100), Ok(()));
        }
    }
}

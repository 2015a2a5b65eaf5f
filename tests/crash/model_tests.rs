//! The model finds each fault in a small history that is right but for it.

use gateway_core::QoS::{self, AtLeastOnce, ExactlyOnce};

use super::{
    history::{Event, Msg, MsgId, Record, states},
    model::{Cast, Facts, Violation, matches},
};

const PUBLISHER: usize = 0;
const SUBSCRIBER: usize = 1;
const OTHER: usize = 2;
const PROBE: usize = 3;

fn id(seq: u32) -> MsgId {
    MsgId { publisher: PUBLISHER, seq }
}

#[derive(Default)]
struct Story(Vec<Record>);

impl Story {
    /// Publisher and subscribers are connected and subscribed.
    fn new(filter: &str) -> Self {
        let mut story = Self::default();
        for client in [PUBLISHER, SUBSCRIBER, OTHER] {
            story.then(client, Event::Connect { clean: false });
            story.connected(client, false);
        }
        for client in [SUBSCRIBER, OTHER] {
            story.then(client, Event::Subscribe { filter: filter.to_owned(), qos: ExactlyOnce });
            story.then(client, Event::Subscribed { filter: filter.to_owned() });
        }
        story
    }

    fn then(&mut self, client: usize, event: Event) {
        self.0.push(Record { at: 10 * (self.0.len() as u64 + 1), client, event });
    }

    fn connected(&mut self, client: usize, present: bool) {
        self.then(client, Event::Connected { clean: false, present, persistent: true });
    }

    fn publish(&mut self, seq: u32, qos: QoS, retain: bool) {
        let topic = if retain { "r" } else { "t" }.to_owned();
        let msg = Msg { id: id(seq), topic, qos, retain };
        self.then(PUBLISHER, Event::Publish { packet_id: seq as u16 + 1, msg });
    }

    fn acked(&mut self, seq: u32) {
        self.then(PUBLISHER, Event::Acked { packet_id: seq as u16 + 1 });
    }

    fn arrive(&mut self, client: usize, seq: u32, qos: QoS, packet_id: u16) {
        self.receive(client, seq, qos, packet_id, false, "t");
    }

    fn receive(&mut self, client: usize, seq: u32, qos: QoS, packet_id: u16, retain: bool, topic: &str) {
        let states = states(&self.0, 4);
        let fresh = qos != ExactlyOnce || !states[client].received.contains_key(&packet_id);
        let topic = topic.to_owned();
        self.then(client, Event::Received { packet_id, qos, retain, topic, id: Some(id(seq)), fresh });
    }

    /// The publisher connects with a will, its message `seq`.
    fn connect_with_will(&mut self, seq: u32, delayed: bool) {
        let msg = Msg { id: id(seq), topic: "t".to_owned(), qos: ExactlyOnce, retain: false };
        self.then(PUBLISHER, Event::Will { msg, delayed });
        self.then(PUBLISHER, Event::Connect { clean: false });
        self.connected(PUBLISHER, true);
    }

    fn found(&self, probe: bool) -> Vec<Violation> {
        let cast = Cast { persistent: [PUBLISHER, SUBSCRIBER, OTHER].into(), probe: probe.then_some(PROBE) };
        Facts::new(&self.0, &cast).violations(&cast)
    }
}

#[test]
fn filters_match_as_the_specification_says() {
    for (filter, topic) in [("a/b", "a/b"), ("a/+", "a/b"), ("a/#", "a"), ("#", "a/b"), ("+/b/#", "a/b/c")] {
        assert!(matches(filter, topic), "{filter} {topic}");
    }
    for (filter, topic) in [("a/b", "a"), ("a", "a/b"), ("a/+", "a"), ("+", "a/b"), ("a/#", "b/c")] {
        assert!(!matches(filter, topic), "{filter} {topic}");
    }
}

#[test]
fn a_good_history_is_not_accused() {
    let mut story = Story::new("t");
    story.publish(0, ExactlyOnce, false);
    story.publish(1, AtLeastOnce, false);
    story.acked(0);
    story.acked(1);
    story.publish(2, AtLeastOnce, false); // Never acknowledged, never seen.
    for client in [SUBSCRIBER, OTHER] {
        story.arrive(client, 0, ExactlyOnce, 5);
        story.then(client, Event::Connect { clean: false });
        story.connected(client, true);
        story.arrive(client, 0, ExactlyOnce, 5);
        story.arrive(client, 1, AtLeastOnce, 6);
        story.arrive(client, 1, AtLeastOnce, 6);
        story.then(client, Event::Released { packet_id: 5 });
    }
    assert_eq!(story.found(false), []);
}

#[test]
fn a_lost_message_is_found() {
    let mut story = Story::new("t");
    story.publish(0, AtLeastOnce, false);
    story.acked(0);
    story.arrive(OTHER, 0, AtLeastOnce, 1);
    let lost = Violation::Lost { client: SUBSCRIBER, msg: id(0), topic: "t".to_owned() };
    assert_eq!(story.found(false), [lost]);
}

#[test]
fn a_message_before_the_subscription_is_confirmed_may_be_missed() {
    let mut story = Story::default();
    for client in [PUBLISHER, SUBSCRIBER] {
        story.then(client, Event::Connect { clean: false });
        story.connected(client, false);
    }
    story.then(SUBSCRIBER, Event::Subscribe { filter: "t".to_owned(), qos: AtLeastOnce });
    story.publish(0, AtLeastOnce, false);
    story.then(SUBSCRIBER, Event::Subscribed { filter: "t".to_owned() });
    story.acked(0);
    assert_eq!(story.found(false), []);
}

#[test]
fn a_repeated_qos_2_message_is_found() {
    let mut story = Story::new("t");
    story.publish(0, ExactlyOnce, false);
    story.arrive(SUBSCRIBER, 0, ExactlyOnce, 1);
    story.then(SUBSCRIBER, Event::Released { packet_id: 1 });
    story.arrive(SUBSCRIBER, 0, ExactlyOnce, 1);
    assert_eq!(story.found(false), [Violation::Duplicate { client: SUBSCRIBER, msg: id(0) }]);
}

#[test]
fn a_reused_packet_identifier_is_found() {
    let mut story = Story::new("t");
    story.publish(0, ExactlyOnce, false);
    story.publish(1, ExactlyOnce, false);
    story.arrive(SUBSCRIBER, 0, ExactlyOnce, 1);
    story.arrive(SUBSCRIBER, 1, ExactlyOnce, 1);
    let reused = Violation::IdReused { client: SUBSCRIBER, packet_id: 1, old: Some(id(0)), new: Some(id(1)) };
    assert_eq!(story.found(false), [reused]);
}

#[test]
fn wrong_order_is_found() {
    let mut story = Story::new("t");
    story.publish(0, AtLeastOnce, false);
    story.publish(1, AtLeastOnce, false);
    story.arrive(SUBSCRIBER, 1, AtLeastOnce, 1);
    story.arrive(SUBSCRIBER, 0, AtLeastOnce, 2);
    let wrong = Violation::OutOfOrder { client: SUBSCRIBER, msg: id(0), after: id(1) };
    assert_eq!(story.found(false), [wrong]);
}

#[test]
fn subscribing_between_two_messages_may_bring_the_older_one_later() {
    let mut story = Story::new("other");
    story.publish(0, AtLeastOnce, false);
    story.publish(1, AtLeastOnce, false);
    story.then(SUBSCRIBER, Event::Subscribe { filter: "t".to_owned(), qos: AtLeastOnce });
    story.then(SUBSCRIBER, Event::Subscribed { filter: "t".to_owned() });
    story.arrive(SUBSCRIBER, 1, AtLeastOnce, 1);
    // The publisher has connected anew and sends both again.
    story.arrive(SUBSCRIBER, 0, AtLeastOnce, 2);
    assert_eq!(story.found(false), []);
}

#[test]
fn a_group_that_loses_or_repeats_is_found() {
    let mut story = Story::new("$share/g/t");
    for seq in 0..3 {
        story.publish(seq, ExactlyOnce, false);
        story.acked(seq);
    }
    story.arrive(SUBSCRIBER, 0, ExactlyOnce, 1);
    story.arrive(OTHER, 1, ExactlyOnce, 1);
    story.arrive(SUBSCRIBER, 1, ExactlyOnce, 2);
    let group = || "g".to_owned();
    let expected = [
        Violation::GroupLost { group: group(), msg: id(2) },
        Violation::GroupDuplicate { group: group(), msg: id(1) },
    ];
    assert_eq!(story.found(false), expected);
}

#[test]
fn what_was_never_published_is_found() {
    let mut story = Story::new("t");
    story.arrive(SUBSCRIBER, 7, AtLeastOnce, 1);
    assert!(matches!(story.found(false)[..], [Violation::Phantom { client: SUBSCRIBER, .. }]));
}

#[test]
fn a_subscription_that_comes_back_from_the_dead_is_found() {
    let mut story = Story::new("t");
    story.then(SUBSCRIBER, Event::Unsubscribe { filter: "t".to_owned() });
    story.then(SUBSCRIBER, Event::Unsubscribed { filter: "t".to_owned() });
    story.publish(0, AtLeastOnce, false);
    story.arrive(SUBSCRIBER, 0, AtLeastOnce, 1);
    assert!(matches!(story.found(false)[..], [Violation::Phantom { client: SUBSCRIBER, .. }]));
}

#[test]
fn a_lost_session_is_found() {
    let mut story = Story::new("t");
    story.then(SUBSCRIBER, Event::Connect { clean: false });
    story.connected(SUBSCRIBER, false);
    assert_eq!(story.found(false), [Violation::SessionLost { client: SUBSCRIBER }]);
}

#[test]
fn a_discarded_session_that_comes_back_is_found() {
    let mut story = Story::new("t");
    story.publish(0, AtLeastOnce, false);
    story.then(SUBSCRIBER, Event::Connect { clean: true });
    story.then(SUBSCRIBER, Event::Connected { clean: true, present: false, persistent: true });
    story.then(SUBSCRIBER, Event::Connect { clean: false });
    story.connected(SUBSCRIBER, true);
    story.arrive(SUBSCRIBER, 0, AtLeastOnce, 1);
    assert!(matches!(story.found(false)[..], [Violation::Phantom { client: SUBSCRIBER, .. }]));
}

#[test]
fn acknowledgements_out_of_turn_are_found() {
    let mut story = Story::new("t");
    story.publish(0, AtLeastOnce, false);
    story.publish(1, AtLeastOnce, false);
    story.acked(1);
    story.acked(1);
    for seq in 0..2 {
        for client in [SUBSCRIBER, OTHER] {
            story.arrive(client, seq, AtLeastOnce, 1);
        }
    }
    let wrong = Violation::AckOrder { client: PUBLISHER, packet_id: 2 };
    assert_eq!(story.found(false), [wrong.clone(), wrong]);
}

#[test]
fn an_old_retained_message_is_found() {
    for (kept, fine) in [(0, false), (1, true), (2, true)] {
        let mut story = Story::default();
        story.then(PUBLISHER, Event::Connect { clean: false });
        story.connected(PUBLISHER, false);
        for seq in 0..3 {
            story.publish(seq, AtLeastOnce, true);
        }
        story.acked(0);
        story.acked(1);
        story.then(PROBE, Event::Subscribe { filter: "r".to_owned(), qos: AtLeastOnce });
        story.receive(PROBE, kept, AtLeastOnce, 1, true, "r");
        let old = Violation::RetainedOld { topic: "r".to_owned(), have: Some(0), acked: 1 };
        assert_eq!(story.found(true), if fine { vec![] } else { vec![old] });
    }
}

#[test]
fn a_will_lost_after_the_next_connection_was_accepted_is_found() {
    let mut story = Story::new("t");
    story.connect_with_will(0, false);
    assert_eq!(story.found(false), [], "the connection may still be there");
    story.then(PUBLISHER, Event::Connect { clean: false });
    assert_eq!(story.found(false), [], "it may come");
    story.connected(PUBLISHER, true);
    story.arrive(OTHER, 0, ExactlyOnce, 1);
    let lost = Violation::Lost { client: SUBSCRIBER, msg: id(0), topic: "t".to_owned() };
    assert_eq!(story.found(false), [lost]);
    story.arrive(SUBSCRIBER, 0, ExactlyOnce, 1);
    story.then(SUBSCRIBER, Event::Released { packet_id: 1 });
    story.arrive(SUBSCRIBER, 0, ExactlyOnce, 2);
    assert_eq!(story.found(false), [], "it may come twice");
}

#[test]
fn no_will_is_due_after_a_disconnect_or_an_unanswered_connect() {
    let mut story = Story::new("t");
    story.connect_with_will(0, false);
    story.then(PUBLISHER, Event::Disconnect);
    let msg = Msg { id: id(1), topic: "t".to_owned(), qos: ExactlyOnce, retain: false };
    story.then(PUBLISHER, Event::Will { msg, delayed: false });
    story.then(PUBLISHER, Event::Connect { clean: false });
    story.connect_with_will(2, false);
    assert_eq!(story.found(false), []);
}

/// A CONNECT that its client has given up may be handled later than the next one.
#[test]
fn only_wills_of_answered_connections_must_come_in_order() {
    for is_answered in [false, true] {
        let mut story = Story::new("t");
        if is_answered {
            story.connect_with_will(0, false);
        } else {
            let msg = Msg { id: id(0), topic: "t".to_owned(), qos: ExactlyOnce, retain: false };
            story.then(PUBLISHER, Event::Will { msg, delayed: false });
            story.then(PUBLISHER, Event::Connect { clean: false });
        }
        story.connect_with_will(1, false);
        story.arrive(SUBSCRIBER, 1, ExactlyOnce, 1);
        story.then(SUBSCRIBER, Event::Released { packet_id: 1 });
        story.arrive(SUBSCRIBER, 0, ExactlyOnce, 2);
        let late = Violation::OutOfOrder { client: SUBSCRIBER, msg: id(0), after: id(1) };
        assert_eq!(story.found(false).contains(&late), is_answered);
    }
}

#[test]
fn a_will_that_comes_although_its_client_was_back_in_time_is_found() {
    let mut story = Story::new("t");
    story.connect_with_will(0, true);
    story.connect_with_will(1, true);
    assert_eq!(story.found(false), []);
    story.arrive(SUBSCRIBER, 0, ExactlyOnce, 1);
    assert!(matches!(story.found(false)[..], [Violation::Phantom { client: SUBSCRIBER, .. }]));
}

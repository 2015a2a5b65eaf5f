//! Members and a store that do anything, in any order.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, Copy)]
enum Step {
    Publish { qos2: bool, times: usize },
    Come { member: usize, room: Option<usize> },
    Leave { member: usize },
    Room { member: usize, room: Option<usize> },
    Commit,
    Fail,
    Ask,
    Tick,
}

fn step() -> impl Strategy<Value = Step> {
    let room = || prop_oneof![Just(None), (0..5usize).prop_map(Some), (0..600usize).prop_map(Some)];
    prop_oneof![
        6 => (any::<bool>(), 1..40usize).prop_map(|(qos2, times)| Step::Publish { qos2, times }),
        1 => Just(Step::Publish { qos2: false, times: 700 }),
        2 => (0..2usize, room()).prop_map(|(member, room)| Step::Come { member, room }),
        2 => (0..2usize).prop_map(|member| Step::Leave { member }),
        1 => (0..2usize, room()).prop_map(|(member, room)| Step::Room { member, room }),
        5 => Just(Step::Commit),
        1 => Just(Step::Fail),
        4 => Just(Step::Ask),
        1 => Just(Step::Tick),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Checks, for any steps of members and store, that an acknowledged message ends in a member's durable queue, at QoS 2 once,
    /// and that a message refused at QoS 2 is in none.
    #[test]
    fn nothing_acknowledged_is_lost_or_doubled_on_its_way_through_the_queue(
        steps in proptest::collection::vec(step(), 1..80)
    ) {
        let mut scene = Scene::new(2);
        let mut failed = false;
        for step in steps {
            match step {
                Step::Publish { qos2, times } => {
                    let qos = if qos2 { QoS::ExactlyOnce } else { QoS::AtLeastOnce };
                    for _ in 0..times {
                        scene.publish(qos);
                    }
                }
                Step::Come { member, room } => scene.come(member, room),
                Step::Leave { member } => scene.leave(member),
                Step::Room { member, room } => scene.members[member].set_room(room),
                Step::Commit => drop(scene.disk.commit()),
                Step::Fail => {
                    failed = true;
                    scene.disk.set_failing(true);
                    scene.disk.commit();
                    prop_assert_eq!(scene.disk.health(), StoreHealth::Failing);
                    scene.ask();
                    scene.disk.set_failing(false);
                }
                Step::Ask => scene.ask(),
                Step::Tick => scene.bench.pass(1),
            }
            prop_assert!(scene.bench.broker.gauges().queued_bytes < 2500 * 200);
        }
        scene.leave(1);
        scene.come(0, None);
        scene.settle();
        scene.bench.pass(1);
        scene.settle();
        let stored = scene.stored();
        let mut times = BTreeMap::new();
        stored.iter().for_each(|payload| *times.entry(payload.clone()).or_insert(0) += 1);
        for (payload, qos, commit) in &scene.published {
            let times = times.get(payload).copied().unwrap_or(0);
            let result = commit.result();
            prop_assert!(result.is_some(), "the publisher of {} waits for ever", payload);
            match (result, qos) {
                (Some(Ok(())), QoS::ExactlyOnce) => prop_assert_eq!(times, 1, "{}", payload),
                (Some(Ok(())), _) => prop_assert!(times >= 1 && (failed || times == 1), "{} {}", payload, times),
                (_, QoS::ExactlyOnce) => prop_assert_eq!(times, 0, "{}", payload),
                _ => {}
            }
        }
        prop_assert_eq!(scene.group_queue(), 0);
        prop_assert_eq!(scene.bench.broker.gauges().queued_bytes, 0);
    }
}

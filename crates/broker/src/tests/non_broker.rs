use super::*;

/// In whichever way a device publishes, no other device gets it, and streams do.
#[test]
fn nothing_goes_from_device_to_device() {
    let mut bench = Bench::with_mode(Limits::default(), true);
    let (from, to) = (bench.device("from"), bench.device("to"));
    let stream = Arc::new(TestStream::default());
    let filters = ["#".to_owned()];
    let _handle = bench.broker.attach_stream(Arc::clone(&stream) as Arc<dyn Target>, &filters);
    for filter in ["devices/to/#", "devices/to/x", "$share/g/devices/to/#"] {
        bench.subscribe(&to, filter);
    }
    let published = bench.publish_from(&from, "devices/to/x", "plain", true);
    assert_eq!((published.matched, published.sent), (1, 1));
    assert!(ready(bench.broker.retained("devices/to/x", bench.now)).unwrap().is_none());
    let leaver = Connect { will: Some(will("devices/to/x", "will", 0)), ..Connect::default() };
    let leaver = bench.connect("leaver", leaver);
    bench.close(&leaver);
    assert!(to.got().is_empty());
    assert_eq!(stream.payloads(), ["plain", "will"]);
    // Offline, neither the session nor the group keeps it.
    bench.close(&to);
    bench.publish_from(&from, "devices/to/x", "offline", false);
    let to = bench.device("to");
    assert!(to.got().is_empty());
    assert_eq!(bench.broker.gauges().queued_bytes, 0);
}

#[test]
fn backends_reach_devices_and_retain_for_them() {
    let mut bench = Bench::with_mode(Limits::default(), true);
    let device = bench.device("d");
    bench.subscribe(&device, "devices/d/#");
    bench.publish_with("devices/d/x", "hello", |message| message.retain = true);
    assert_eq!(device.payloads(), ["hello"]);
    // A device cannot clear it.
    bench.publish_from(&device, "devices/d/x", "", true);
    assert!(ready(bench.broker.retained("devices/d/x", bench.now)).unwrap().is_some());
    assert!(bench.subscribe(&device, "devices/d/x").replay.is_some());
}

#[test]
fn filters_outside_the_namespace_are_refused() {
    let mut bench = Bench::with_mode(Limits::default(), true);
    let device = bench.device("d");
    for filter in ["#", "+/d/x", "devices/#", "devices/+/x", "devices/e/#", "$share/g/#", "$SYS/#"] {
        let refused = bench.try_subscribe(&device, &request(filter)).err();
        assert_eq!(refused, Some(SubscribeError::NotAuthorized), "{filter}");
    }
    assert!(bench.broker.is_non_broker());
    assert!(bench.broker.inner.rules.namespace_allows("d", "devices/d/+", None));
    assert!(!bench.broker.inner.rules.namespace_allows("d", "devices/e/+", None));
    assert!(Bench::new(Limits::default()).broker.inner.rules.namespace_allows("d", "anything/#", None));
}

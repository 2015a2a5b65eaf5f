//! Groups whose filter was narrowed: what they took under the wider one is not for who has the narrower one alone.

use std::time::Duration;

use super::*;

const HOUR: Option<prost_types::Duration> = Some(prost_types::Duration { seconds: 3600, nanos: 0 });

fn update(group: v1::Group) -> v1::UpdateGroupRequest {
    let update_mask = Some(prost_types::FieldMask { paths: vec!["filter".to_owned()] });
    v1::UpdateGroupRequest { group: Some(group), update_mask }
}

/// Everybody's group, which gets what two tenants send.
async fn shared(guarded: &Guarded, max_attempts: u32) {
    let wide = group("g", &["t/#"], &["a-", "b-"]);
    let wide = v1::Group { replay_age: HOUR, max_attempts, ..wide };
    guarded.groups("root").create_group(create(wide)).await.unwrap();
}

/// Makes it one of the tenant alone, and of one of its topics.
async fn narrow(guarded: &Guarded) {
    narrow_group(guarded, "g").await;
}

async fn narrow_group(guarded: &Guarded, name: &str) {
    let request = update(group(name, &["t/a/x"], &["a-"]));
    soon("a change", guarded.groups("root").update_group(request)).await.unwrap();
}

fn seek(at: v1::position::At) -> v1::SeekGroupRequest {
    v1::SeekGroupRequest { name: "g".to_owned(), to: Some(v1::Position { at: Some(at) }) }
}

/// Of a message, what was published.
fn payload(message: &v1::ConsumedMessage) -> String {
    let Some(v1::consumed_message::Content::Message(message)) = &message.content else {
        panic!("{message:?}")
    };
    String::from_utf8(message.payload.to_vec()).unwrap()
}

impl Guarded {
    fn sends(&self, device: &str, topic: &str, text: &str) {
        self.setup.raw(device, |_| {}).publish_acked(topic, text.as_bytes(), false);
    }

    async fn restarted(self) -> Self {
        let Self { setup, file, tokens, _dir } = self;
        let setup = setup.restarted(|config| config.backends.tokens = Some(file.clone())).await;
        Self { setup, file, tokens, _dir }
    }

    /// Fetches so many messages, and says what their payloads are, in order, and their names.
    async fn fetched(&self, token: &str, count: usize) -> (Vec<String>, Vec<String>) {
        let mut all = Vec::new();
        while all.len() < count {
            let answer = soon("a fetch", self.consumer(token).fetch(fetch("g"))).await.unwrap();
            all.extend(answer.into_inner().messages);
        }
        all.sort_unstable_by_key(payload);
        (all.iter().map(payload).collect(), all.into_iter().map(|message| message.ack_id).collect())
    }

    async fn acknowledge(&self, token: &str, ack_ids: Vec<String>) {
        let request = v1::AcknowledgeRequest { group: "g".to_owned(), ack_ids };
        soon("an answer", self.consumer(token).acknowledge(request)).await.unwrap();
    }

    /// Waits for a whole round of the upkeep, which looks at former filters of all groups. An empty group is given to the
    /// tenant by the first round after its filter was narrowed; the second such group needs a later round than the first.
    async fn a_round(&self) {
        for name in ["first", "second"] {
            self.groups("root").create_group(create(group(name, &["t/#"], &["a-", "b-"]))).await.unwrap();
            narrow_group(self, name).await;
            self.shared_no_more().await;
            assert_eq!(self.listed("consumer-of-a").await, [name]);
            let delete = v1::DeleteGroupRequest { name: name.to_owned(), allow_missing: false };
            self.groups("root").delete_group(delete).await.unwrap();
        }
    }

    /// Waits until the tenant may have to do with the group.
    async fn shared_no_more(&self) {
        let given = async {
            while self.listed("consumer-of-a").await.is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        soon("the group", given).await;
    }

    /// The tenant gets nothing of the group, and cannot change it.
    async fn refuses_tenant(&self) {
        assert!(self.listed("admin-of-a").await.is_empty());
        let mut consumer = self.consumer("consumer-of-a");
        out_of_scope(soon("a fetch", consumer.fetch(fetch("g"))).await, "group");
        let open = v1::Open { group: "g".to_owned(), ..Default::default() };
        let open = v1::ConsumeRequest { action: Some(Action::Open(open)) };
        let stream = consumer.consume(tokio_stream::iter([open])).await.unwrap();
        let status = soon("the end", stream.into_inner().message()).await.unwrap_err();
        assert_eq!(refusal(&status), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()));

        let mut admin = self.groups("admin-of-a");
        let name = "g".to_owned();
        let pending = v1::ListPendingRequest { name: name.clone(), ..Default::default() };
        out_of_scope(admin.list_pending(pending).await, "name");
        let letters = v1::ListDeadLettersRequest { name: name.clone(), ..Default::default() };
        out_of_scope(admin.list_dead_letters(letters).await, "name");
        out_of_scope(admin.get_group(v1::GetGroupRequest { name: name.clone() }).await, "name");
        out_of_scope(admin.update_group(update(group("g", &["t/a/y"], &["a-"]))).await, "group.name");
        let same = v1::Group { replay_age: HOUR, ..group("g", &["t/a/x"], &["a-"]) };
        out_of_scope(admin.create_group(create(same)).await, "group.filter");
        out_of_scope(admin.seek_group(seek(v1::position::At::Latest(true))).await, "name");
        let delete = v1::DeleteGroupRequest { name, allow_missing: true };
        out_of_scope(admin.delete_group(delete).await, "name");
    }
}

/// The failure: a message of another tenant, which the group had taken before its filter was narrowed, came to this one.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_wider_filter_let_in_is_not_for_who_has_the_narrower() {
    let guarded = guarded().await;
    shared(&guarded, 0).await;
    guarded.sends("b-1", "t/b/x", "secret");
    guarded.sends("a-1", "t/a/x", "own");
    // Someone has them, and does not acknowledge.
    assert_eq!(guarded.fetched("root", 2).await.0, ["own", "secret"]);
    narrow(&guarded).await;
    guarded.sends("a-1", "t/a/x", "later");
    guarded.sends("b-1", "t/b/x", "not wanted any more");
    guarded.refuses_tenant().await;
    let guarded = guarded.restarted().await;
    guarded.refuses_tenant().await;

    let (texts, ids) = guarded.fetched("root", 3).await;
    assert_eq!(texts, ["later", "own", "secret"]);
    let (own, later) = (ids[2].clone(), ids[..2].to_vec());
    guarded.acknowledge("root", later).await;
    guarded.a_round().await;
    guarded.refuses_tenant().await;
    guarded.acknowledge("root", vec![own]).await;
    guarded.shared_no_more().await;
    guarded.sends("a-2", "t/a/x", "new");
    let mut consumer = guarded.consumer("consumer-of-a");
    let answer = soon("a fetch", consumer.fetch(fetch("g"))).await.unwrap().into_inner();
    assert_eq!(answer.messages.iter().map(payload).collect::<Vec<_>>(), ["new"]);

    // A group may go back as far as the messages under this filter, and not to earlier ones. A caller who does takes
    // the group away from this one.
    let mut admin = guarded.groups("admin-of-a");
    admin.seek_group(seek(v1::position::At::Latest(true))).await.unwrap();
    let earliest = v1::position::At::Earliest(true);
    out_of_scope(admin.seek_group(seek(earliest.clone())).await, "to");
    guarded.groups("root").seek_group(seek(earliest)).await.unwrap();
    guarded.refuses_tenant().await;
}

/// The failure: dead letters of another tenant, from before the filter was narrowed, were shown to this one, which could also put
/// them back for itself, and delete them.
#[tokio::test(flavor = "multi_thread")]
async fn letters_of_a_wider_filter_are_for_those_in_whose_scope_they_are() {
    let guarded = guarded().await;
    shared(&guarded, 1).await;
    for (device, topic, text) in
        [("b-1", "t/b/x", "secret"), ("a-1", "t/a/x", "x"), ("a-2", "t/a/y", "y"), ("a-3", "t/a/x", "z")]
    {
        guarded.sends(device, topic, text);
    }
    let (_, ack_ids) = guarded.fetched("root", 4).await;
    let lease = v1::ModifyLeaseRequest {
        group: "g".to_owned(),
        ack_ids,
        deadline: Some(prost_types::Duration::default()),
        reason: String::new(),
    };
    guarded.consumer("root").modify_lease(lease).await.unwrap();
    let letters = async |token: &str| {
        let request = v1::ListDeadLettersRequest { name: "g".to_owned(), ..Default::default() };
        let page = guarded.groups(token).list_dead_letters(request).await.unwrap().into_inner();
        let text = |letter: &v1::DeadLetter| {
            let Some(v1::dead_letter::Content::Message(message)) = &letter.content else { panic!() };
            String::from_utf8(message.payload.to_vec()).unwrap()
        };
        let mut found: Vec<_> =
            page.dead_letters.iter().map(|letter| (text(letter), letter.id.clone())).collect();
        found.sort_unstable();
        found
    };
    let texts = async |token: &str| -> Vec<String> {
        letters(token).await.into_iter().map(|(text, _)| text).collect()
    };
    soon("the letters", async {
        while letters("root").await.len() < 4 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    narrow(&guarded).await;
    guarded.shared_no_more().await;
    assert_eq!(texts("admin-of-a").await, ["x", "y", "z"]);
    assert_eq!(texts("root").await, ["secret", "x", "y", "z"]);
    let secret = letters("root").await[0].1.clone();

    let requeue = async |token: &str, ids: Vec<String>| {
        let request = v1::RequeueDeadLettersRequest { name: "g".to_owned(), ids };
        soon("letters", guarded.groups(token).requeue_dead_letters(request)).await.unwrap().into_inner().count
    };
    let purge = async |token: &str, ids: Vec<String>| {
        let request = v1::PurgeDeadLettersRequest { name: "g".to_owned(), ids };
        soon("letters", guarded.groups(token).purge_dead_letters(request)).await.unwrap().into_inner().count
    };
    assert_eq!(requeue("admin-of-a", vec![secret.clone()]).await, 0);
    assert_eq!(purge("admin-of-a", vec![secret.clone()]).await, 0);
    // Put back it would be a message of a group whose filter does not match it: also for those who may see it.
    assert_eq!(requeue("root", vec![secret]).await, 0);
    assert_eq!(requeue("admin-of-a", Vec::new()).await, 2, "what the filter matches");
    assert_eq!(guarded.fetched("consumer-of-a", 2).await.0, ["x", "z"]);
    assert_eq!(purge("admin-of-a", Vec::new()).await, 1);
    assert_eq!(texts("root").await, ["secret"]);
    assert_eq!(purge("root", Vec::new()).await, 1);
}

/// Filters that are wider than before, or other ones that the same callers may have, keep nobody from the group.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_have_both_filters_goes_on_at_once() {
    let guarded = guarded().await;
    guarded.groups("root").create_group(create(group("g", &["t/a/x"], &["a-"]))).await.unwrap();
    guarded.sends("a-1", "t/a/x", "one");
    let request = update(group("g", &["t/a/y"], &["a-"]));
    soon("a change", guarded.groups("admin-of-a").update_group(request)).await.unwrap();
    guarded.sends("a-2", "t/a/y", "two");
    assert_eq!(guarded.fetched("consumer-of-a", 2).await.0, ["one", "two"]);
}

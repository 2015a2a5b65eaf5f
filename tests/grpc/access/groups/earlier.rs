//! A group of an earlier version, which could change the filter of a group and kept a list of those before.

use std::path::Path;

use bytes::Bytes;
use disk::{EmbeddedRecords, RecordOptions};
use store::{DataDir, RecordChange, RecordKind, RecordOutcome, RecordStore as _, RecordWrite};

use super::*;

/// Key of the definition of the group with the number 1.
const DEFINITION: Bytes = Bytes::from_static(b"\0\0\0\x01\x01d");

/// Writes into the record of the only group what an earlier version did when its filter was narrowed.
async fn had_another_filter(data_dir: &Path) {
    let directory = DataDir::open(data_dir).unwrap();
    let records = EmbeddedRecords::open(&directory, &RecordOptions::default()).unwrap();
    let record = records.get(RecordKind::Groups, DEFINITION).await.unwrap().expect("a group");
    let mut record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let wider = serde_json::json!({ "topics": ["#"] });
    record["former"] = serde_json::json!([{ "filter": wider, "until": 7 }]);
    let change = RecordChange::put(RecordKind::Groups, DEFINITION, Bytes::from(record.to_string()));
    let write = RecordWrite { changes: vec![change], fence: None };
    assert_eq!(records.write(write).await.unwrap(), RecordOutcome::Done);
    records.note_closed();
}

impl Guarded {
    async fn restarted(self) -> Self {
        let Self { setup, file, tokens, _dir } = self;
        let change = |config: &mut config::Config| {
            config.backends.tokens = Some(file.clone());
            let data_dir = config.data_dir.clone();
            let runtime = tokio::runtime::Handle::current();
            tokio::task::block_in_place(|| runtime.block_on(had_another_filter(&data_dir)));
        };
        let setup = setup.restarted(change).await;
        Self { setup, file, tokens, _dir }
    }
}

/// Refused for this field, with what is to be done.
fn told<T>(answer: Result<tonic::Response<T>, Status>, field: &str) {
    let Err(status) = answer else { panic!("not refused for {field}") };
    assert!(
        status.message().contains("drain the group") && status.message().contains("delete it"),
        "{status}"
    );
    out_of_scope::<T>(Err(status), field);
}

/// The failure: a message that the wider filter had let in came to who may have the narrower one alone.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_have_everything_drains_a_group_that_had_other_filters() {
    let guarded = guarded().await;
    let own = || group("g", TOPICS, &["a-"]);
    guarded.groups("root").create_group(create(own())).await.unwrap();
    guarded.setup.raw("a-1", |_| {}).publish_acked("t/a/x", b"before", false);
    let guarded = guarded.restarted().await;

    assert!(guarded.listed("admin-of-a").await.is_empty());
    let mut consumer = guarded.consumer("consumer-of-a");
    told(soon("a fetch", consumer.fetch(fetch("g"))).await, "group");
    let open = v1::Open { group: "g".to_owned(), ..Default::default() };
    let open = v1::ConsumeRequest { action: Some(Action::Open(open)) };
    let stream = consumer.consume(tokio_stream::iter([open])).await.unwrap();
    let status = soon("the end", stream.into_inner().message()).await.unwrap_err();
    told::<()>(Err(status), "open.group");

    let mut admin = guarded.groups("admin-of-a");
    let name = "g".to_owned();
    let pending = v1::ListPendingRequest { name: name.clone(), ..Default::default() };
    told(admin.list_pending(pending).await, "name");
    let letters = v1::ListDeadLettersRequest { name: name.clone(), ..Default::default() };
    told(admin.list_dead_letters(letters).await, "name");
    let requeue = v1::RequeueDeadLettersRequest { name: name.clone(), ids: Vec::new() };
    told(admin.requeue_dead_letters(requeue).await, "name");
    let purge = v1::PurgeDeadLettersRequest { name: name.clone(), ids: Vec::new() };
    told(admin.purge_dead_letters(purge).await, "name");
    told(admin.get_group(v1::GetGroupRequest { name: name.clone() }).await, "name");
    let update_mask = Some(prost_types::FieldMask { paths: vec!["paused".to_owned()] });
    told(admin.update_group(v1::UpdateGroupRequest { group: Some(own()), update_mask }).await, "group.name");
    told(admin.create_group(create(own())).await, "group.filter");
    let to = Some(v1::Position { at: Some(v1::position::At::Latest(true)) });
    told(admin.seek_group(v1::SeekGroupRequest { name: name.clone(), to }).await, "name");
    let delete = v1::DeleteGroupRequest { name, allow_missing: true };
    told(admin.delete_group(delete.clone()).await, "name");

    let fetched = soon("a fetch", guarded.consumer("root").fetch(fetch("g"))).await.unwrap().into_inner();
    assert_eq!(fetched.messages.len(), 1);
    guarded.groups("root").delete_group(delete).await.unwrap();
    admin.create_group(create(own())).await.unwrap();
    assert_eq!(guarded.listed("consumer-of-a").await, ["g"]);
}

//! Suite that every [`Ledger`] must pass. Each engine runs all of it in its own tests.
//!
//! Every function gets two handles of one cluster that has no view yet, as two nodes have them.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "tests of other crates")]

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::{
    Assembly, Beat, FORMAT, Inserted, Ledger, MAX_ROW, Misread, Owner, Position, RecordHead, Row, Rows,
    Segment, StoredView, Stream, Swapped, assemble, cut, decode, encode,
};

/// Two handles of one ledger.
pub type Handles = (Box<dyn Ledger>, Box<dyn Ledger>);

/// Runs all of the suite; `fresh` opens a cluster that nobody has used, with its tables made.
pub async fn all(fresh: impl AsyncFn() -> Handles) {
    macro_rules! run {
        ($($case:ident)*) => {$(
            let (one, other) = fresh().await;
            $case(&*one, &*other).await;
        )*};
    }
    run! {
        tables_are_made_twice
        a_view_is_replaced_by_compare_and_set
        one_of_two_replaces_a_view
        owners_follow_the_view
        rows_come_back
        rows_that_come_again_change_nothing
        a_former_owner_is_not_taken_for_the_owner
        reads_go_on_from_a_place
        large_rows_come_back
        a_segment_goes
        signs_of_life_come_back
        homes_and_streams_do_not_mix
        records_come_back
        rows_nobody_wrote_so_are_named
    }
}

/// Owner of a home in an epoch.
pub fn owner(home: u16, node: &str, epoch: u64) -> Owner {
    Owner { home, node: node.into(), incarnation: 0xFEDC_BA98_7654_3210 ^ epoch, epoch }
}

fn view(version: u64, document: &'static [u8], owners: Vec<Owner>) -> StoredView {
    let cluster = 0x0123_4567_89AB_CDEF_FEDC_BA98_7654_3210;
    StoredView { cluster, version, document: Bytes::from_static(document), owners }
}

/// Makes the first view; `a` owns homes 0 and 1 in epoch 1.
async fn begin(ledger: &dyn Ledger) {
    let owners = vec![owner(0, "a", 1), owner(1, "a", 1)];
    assert_eq!(ledger.swap(&view(1, b"first", owners)).await.unwrap(), Swapped::Applied);
}

async fn owners(ledger: &dyn Ledger) -> Vec<Owner> {
    sorted(ledger.owners().await.unwrap())
}

fn sorted(mut owners: Vec<Owner>) -> Vec<Owner> {
    owners.sort_by_key(|owner| owner.home);
    owners
}

fn segment(home: u16, number: u8, epoch: u64, segment: u32) -> Segment {
    Segment { stream: Stream { home, number }, epoch, number: segment }
}

/// Rows of a record of so many parts, each of so many bytes that tell where they belong.
fn rows(segment: Segment, n: u64, parts: u16, bytes: usize) -> Arc<[Row]> {
    let data = |part: u16| {
        let text = format!("{segment:?} {n} {part} ");
        Bytes::from(text.bytes().cycle().take(bytes).collect::<Vec<u8>>())
    };
    (0..parts).map(|part| Row { segment, n, part, parts, data: data(part) }).collect()
}

/// Inserts as an owner, who is told so.
async fn insert(ledger: &dyn Ledger, owner: &Owner, rows: &Arc<[Row]>) {
    let inserted = ledger.insert(owner, Arc::clone(rows)).await.unwrap();
    match inserted {
        Inserted::Owned => {}
        Inserted::Stored => assert!(owners(ledger).await.contains(owner)),
        Inserted::Fenced => panic!("{owner:?} is the owner"),
    }
}

/// All rows of a segment from a place on, read so many bytes at a time.
async fn read(ledger: &dyn Ledger, segment: Segment, from: (u64, u16), bytes: usize) -> Vec<Row> {
    let (mut all, mut from) = (Vec::<Row>::new(), from);
    loop {
        let Rows { rows, more } = ledger.read(segment, from, bytes).await.unwrap();
        let size: usize = rows.iter().map(|row| row.data.len()).sum();
        assert!(rows.len() <= 1 || size <= bytes + 4 * MAX_ROW, "{size} bytes instead of about {bytes}");
        assert!(!more || !rows.is_empty(), "a read that has more goes on");
        all.extend(rows);
        if !more {
            return all;
        }
        from = all.last().map_or(from, |row| (row.n, row.part + 1));
    }
}

const PAGE: usize = 1 << 20;

/// The failure: the second gateway to start, or a `create` that was interrupted, finds tables and fails.
async fn tables_are_made_twice(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    one.create().await.unwrap();
    other.create().await.unwrap();
    assert_eq!(other.view().await.unwrap().unwrap().version, 1, "and nothing is lost");
}

async fn a_view_is_replaced_by_compare_and_set(one: &dyn Ledger, other: &dyn Ledger) {
    assert_eq!(one.view().await.unwrap(), None);
    assert_eq!(one.swap(&view(2, b"too early", Vec::new())).await.unwrap(), Swapped::Conflict);
    let first = view(1, b"first", vec![owner(0, "a", 1)]);
    assert_eq!(one.swap(&first).await.unwrap(), Swapped::Applied);
    assert_eq!(other.swap(&view(1, b"another first", Vec::new())).await.unwrap(), Swapped::Conflict);
    assert_eq!(other.view().await.unwrap(), Some(first));
    let second = view(2, b"\0\xFFsecond", Vec::new());
    assert_eq!(other.swap(&second).await.unwrap(), Swapped::Applied);
    // Versions that have moved on.
    assert_eq!(one.swap(&view(2, b"late", Vec::new())).await.unwrap(), Swapped::Conflict);
    assert_eq!(one.swap(&view(1, b"later", Vec::new())).await.unwrap(), Swapped::Conflict);
    assert_eq!(one.view().await.unwrap(), Some(second));
}

/// The failure: two standbys that take a home at the same time both believe that they have it.
async fn one_of_two_replaces_a_view(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    for version in 2..12 {
        let (a, b) = (view(version, b"a", vec![owner(0, "a", version)]), view(version, b"b", Vec::new()));
        let (by_a, by_b) = tokio::join!(one.swap(&a), other.swap(&b));
        let winner = match (by_a.unwrap(), by_b.unwrap()) {
            (Swapped::Applied, Swapped::Conflict) => a,
            (Swapped::Conflict, Swapped::Applied) => b,
            both => panic!("one of two applies: {both:?}"),
        };
        assert_eq!(one.view().await.unwrap(), Some(winner));
    }
}

async fn owners_follow_the_view(one: &dyn Ledger, other: &dyn Ledger) {
    assert_eq!(owners(one).await, []);
    begin(one).await;
    assert_eq!(owners(other).await, [owner(0, "a", 1), owner(1, "a", 1)]);
    let next = vec![owner(0, "b", u64::MAX >> 1), owner(1, "a", 1), owner(7, "c", 3)];
    assert_eq!(other.swap(&view(2, b"second", next.clone())).await.unwrap(), Swapped::Applied);
    assert_eq!(owners(one).await, next);
    assert_eq!(sorted(one.view().await.unwrap().unwrap().owners), next);
    // A compare-and-set that does not apply changes no owner either.
    let never = view(2, b"never", vec![owner(0, "d", 9)]);
    assert_eq!(one.swap(&never).await.unwrap(), Swapped::Conflict);
    assert_eq!(owners(one).await, next);
    // A home that has no owner any more.
    assert_eq!(one.swap(&view(3, b"third", vec![owner(7, "c", 3)])).await.unwrap(), Swapped::Applied);
    assert_eq!(owners(other).await, [owner(7, "c", 3)]);
}

async fn rows_come_back(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    let segment = segment(0, 0, 1, 0);
    for n in 0..3 {
        insert(one, &owner(0, "a", 1), &rows(segment, n, 2, 100)).await;
    }
    let expected: Vec<Row> = (0..3).flat_map(|n| rows(segment, n, 2, 100).to_vec()).collect();
    assert_eq!(read(other, segment, (0, 0), PAGE).await, expected);
    assert_eq!(read(one, segment, (0, 0), PAGE).await, expected);
}

/// The failure: an insert without an answer is repeated and leaves a row twice, fails, or is answered as another's.
async fn rows_that_come_again_change_nothing(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    let segment = segment(0, 3, 1, 2);
    let whole = rows(segment, 5, 3, 50);
    // Only a part was stored the first time.
    insert(one, &owner(0, "a", 1), &whole[1..2].iter().cloned().collect()).await;
    for _ in 0..3 {
        insert(one, &owner(0, "a", 1), &whole).await;
    }
    let (first, second) = tokio::join!(
        one.insert(&owner(0, "a", 1), Arc::clone(&whole)),
        one.insert(&owner(0, "a", 1), Arc::clone(&whole))
    );
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    assert_eq!(read(other, segment, (0, 0), PAGE).await, whole.to_vec());
}

/// The failure: a paused process wakes up and acknowledges messages that its successor does not know.
async fn a_former_owner_is_not_taken_for_the_owner(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    insert(one, &owner(0, "a", 1), &rows(segment(0, 0, 1, 0), 0, 1, 10)).await;
    let next = vec![owner(0, "b", 2), owner(1, "a", 1)];
    assert_eq!(other.swap(&view(2, b"taken", next)).await.unwrap(), Swapped::Applied);
    insert(other, &owner(0, "b", 2), &rows(segment(0, 0, 2, 0), 0, 1, 10)).await;
    insert(one, &owner(1, "a", 1), &rows(segment(1, 0, 1, 0), 0, 1, 10)).await;
    let former = owner(0, "a", 1);
    let same_epoch = Owner { epoch: 2, ..former.clone() };
    let same_node = Owner { node: "b".into(), epoch: 2, incarnation: 1, ..former.clone() };
    let same_incarnation = Owner { epoch: 1, ..owner(0, "b", 2) };
    for (n, not_owner) in [former, same_epoch, same_node, same_incarnation].iter().enumerate() {
        let rows = rows(segment(0, 0, not_owner.epoch, 0), 1 + n as u64, 1, 10);
        match one.insert(not_owner, rows).await.unwrap() {
            Inserted::Fenced => {}
            Inserted::Stored => assert!(!owners(one).await.contains(not_owner)),
            Inserted::Owned => panic!("{not_owner:?} is not the owner"),
        }
    }
}

async fn reads_go_on_from_a_place(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    let segment = segment(0, 1, 1, 0);
    assert_eq!(other.read(segment, (0, 0), PAGE).await.unwrap().rows, [], "a segment that nobody wrote");
    // Numbers beyond one byte: their order is that of numbers. 13 is missing.
    let numbers: Vec<u64> = (0..20).chain([255, 256, 257, 65_536]).filter(|n| *n != 13).collect();
    for n in numbers.iter().rev() {
        insert(one, &owner(0, "a", 1), &rows(segment, *n, 3, 1_000)).await;
    }
    let expected: Vec<Row> = numbers.iter().flat_map(|n| rows(segment, *n, 3, 1_000).to_vec()).collect();
    for bytes in [1, 2_500, 10_000, PAGE] {
        assert_eq!(read(other, segment, (0, 0), bytes).await, expected, "{bytes} bytes at a time");
    }
    for from in [(0, 1), (1, 0), (12, 2), (12, 3), (13, 0), (255, 1), (65_536, 2), (65_536, 3), (70_000, 0)] {
        let rest: Vec<Row> = expected.iter().filter(|row| (row.n, row.part) >= from).cloned().collect();
        assert_eq!(read(other, segment, from, 5_000).await, rest, "from {from:?}");
    }
    let some = other.read(segment, (0, 0), 10_000).await.unwrap();
    assert!(some.more && some.rows.len() < 40, "a read of 10,000 bytes gave {} rows", some.rows.len());
}

async fn large_rows_come_back(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    let segment = segment(0, 0, 1, 0);
    let large = rows(segment, 0, 40, MAX_ROW);
    insert(one, &owner(0, "a", 1), &large).await;
    insert(one, &owner(0, "a", 1), &rows(segment, 1, 1, 0)).await;
    let expected: Vec<Row> = large.iter().cloned().chain(rows(segment, 1, 1, 0).to_vec()).collect();
    for bytes in [PAGE, 16 << 20] {
        assert!(read(other, segment, (0, 0), bytes).await == expected, "{bytes} bytes at a time");
    }
}

async fn a_segment_goes(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    let (first, second) = (segment(0, 0, 1, 0), segment(0, 0, 1, 1));
    let others = [second, segment(0, 1, 1, 0), segment(1, 0, 1, 0)];
    for segment in others.into_iter().chain([first]) {
        insert(one, &owner(segment.stream.home, "a", 1), &rows(segment, 4, 2, 10)).await;
    }
    one.delete(first).await.unwrap();
    assert_eq!(read(other, first, (0, 0), PAGE).await, []);
    for left in others {
        assert_eq!(read(other, left, (0, 0), PAGE).await, rows(left, 4, 2, 10).to_vec());
    }
    // Again, and one that was never there.
    one.delete(first).await.unwrap();
    other.delete(segment(0, 4, 7, 7)).await.unwrap();
}

async fn signs_of_life_come_back(one: &dyn Ledger, other: &dyn Ledger) {
    assert_eq!(one.beats().await.unwrap(), []);
    let beat = |node: &str, incarnation, number, about: &'static [u8]| Beat {
        node: node.into(),
        incarnation,
        number,
        about: Bytes::from_static(about),
    };
    assert_eq!(one.beat(&beat("a", 1, 7, b"")).await.unwrap(), [], "a beat before there is a view");
    begin(one).await;
    assert_eq!(sorted(one.beat(&beat("a", 1, 8, b"")).await.unwrap()), owners(one).await);
    other.beat(&beat("b", u64::MAX, 1, b"\0about")).await.unwrap();
    let all = async |ledger: &dyn Ledger| {
        let mut beats = ledger.beats().await.unwrap();
        beats.sort_by(|one, other| one.node.cmp(&other.node));
        beats
    };
    assert_eq!(all(one).await, [beat("a", 1, 8, b""), beat("b", u64::MAX, 1, b"\0about")]);
    // A new incarnation counts from the beginning.
    one.beat(&beat("a", 2, 1, b"new")).await.unwrap();
    assert_eq!(all(other).await, [beat("a", 2, 1, b"new"), beat("b", u64::MAX, 1, b"\0about")]);
}

async fn homes_and_streams_do_not_mix(one: &dyn Ledger, other: &dyn Ledger) {
    let (a, b) = (owner(0, "a", 1), owner(1, "b", 1));
    let first = view(1, b"two nodes", vec![a.clone(), b.clone()]);
    assert_eq!(one.swap(&first).await.unwrap(), Swapped::Applied);
    let segments = |home| (0..5).flat_map(move |number| [0, 1].map(|s| segment(home, number, 1, s)));
    for n in 0..3 {
        for (segment_a, segment_b) in segments(0).zip(segments(1)) {
            insert(one, &a, &rows(segment_a, n, 1, 200)).await;
            insert(other, &b, &rows(segment_b, n, 2, 100)).await;
        }
    }
    for (segment, parts, bytes) in segments(0).map(|s| (s, 1, 200)).chain(segments(1).map(|s| (s, 2, 100))) {
        let expected: Vec<Row> = (0..3).flat_map(|n| rows(segment, n, parts, bytes).to_vec()).collect();
        assert_eq!(read(other, segment, (0, 0), PAGE).await, expected);
    }
}

fn head(segment: Segment, n: u64, predecessor: u32) -> RecordHead {
    RecordHead { stream: segment.stream, epoch: segment.epoch, n, time: 1_700_000_000_000_000, predecessor }
}

/// A record of so many bytes, and its position.
fn record(segment: Segment, n: u64, predecessor: u32, bytes: usize) -> (Bytes, Position) {
    let changes: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8 ^ n as u8).collect();
    encode(&head(segment, n, predecessor), &changes)
}

/// Rows of each number, in order.
fn by_number(rows: &[Row]) -> impl Iterator<Item = &[Row]> {
    rows.chunk_by(|row, next| row.n == next.n)
}

async fn records_come_back(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    let segment = segment(0, 2, 1, 0);
    let sizes = [0, 1, 100, MAX_ROW - 40, MAX_ROW - 39, 3 * MAX_ROW, 1_234_567];
    let (mut records, mut last) = (Vec::new(), Position::default());
    for (n, bytes) in sizes.into_iter().enumerate() {
        let (record, position) = record(segment, n as u64, last.sum, bytes);
        insert(one, &owner(0, "a", 1), &cut(&record, segment, n as u64).unwrap()).await;
        records.push((record, position));
        last = position;
    }
    let found = read(other, segment, (0, 0), 2 * PAGE).await;
    assert_eq!(by_number(&found).count(), records.len());
    let mut last = Position::default();
    for (rows, (record, position)) in by_number(&found).zip(records) {
        let n = rows[0].n;
        let Ok(Assembly::Whole(found_head, found_position, changes)) = assemble(segment, n, rows) else {
            panic!("record {n} is not whole");
        };
        assert_eq!(found_head, head(segment, n, last.sum));
        assert_eq!(found_position, position);
        assert_eq!(encode(&found_head, &changes).0, record, "the same bytes");
        // Without one of its rows it is not there, whichever that is.
        for missing in 0..rows.len() {
            let mut fewer = rows.to_vec();
            fewer.remove(missing);
            assert_eq!(assemble(segment, n, &fewer), Ok(Assembly::Incomplete));
        }
        last = position;
    }
}

/// The failure: a row that a broken disk or a hand has changed is taken for the end of its stream, and everything behind it is lost
/// in silence.
async fn rows_nobody_wrote_so_are_named(one: &dyn Ledger, other: &dyn Ledger) {
    begin(one).await;
    let home = segment(0, 0, 1, 0);
    let whole = |n: u64, bytes: usize| {
        let record = record(home, n, 0, bytes).0;
        (cut(&record, home, n).unwrap().to_vec(), record)
    };
    let with = |rows: &[Row], at: usize, change: &dyn Fn(&mut Row)| {
        let mut rows = rows.to_vec();
        change(&mut rows[at]);
        rows
    };
    let mut cases: Vec<(&str, Vec<Row>, Misread)> = Vec::new();
    let flip = |row: &mut Row, at: usize| {
        let mut data = BytesMut::from(&row.data[..]);
        let at = at % data.len();
        data[at] ^= 1;
        row.data = data.freeze();
    };
    for (n, at) in [0, 1, 4, 12, 20, 28, 32, 36, 40, 99].into_iter().enumerate() {
        let (rows, _) = whole(n as u64, 60);
        cases.push(("a flipped bit", with(&rows, 0, &|row| flip(row, at)), Misread::Damaged));
    }
    let (rows, _) = whole(20, 3 * MAX_ROW);
    cases.push(("a flipped bit in a part", with(&rows, 2, &|row| flip(row, 77)), Misread::Damaged));
    let cut_short = |row: &mut Row| row.data.truncate(row.data.len() - 1);
    let (rows, _) = whole(21, 60);
    cases.push(("a row that is cut", with(&rows, 0, &cut_short), Misread::Damaged));
    let (rows, _) = whole(22, 60);
    cases.push(("a row of nothing", with(&rows, 0, &|row| row.data.clear()), Misread::Damaged));
    let (rows, _) = whole(23, 2 * MAX_ROW);
    cases.push(("a part that is cut", with(&rows, 0, &cut_short), Misread::Damaged));
    let (rows, _) = whole(24, 2 * MAX_ROW);
    cases.push(("another count of parts", with(&rows, 1, &|row| row.parts = 4), Misread::Damaged));
    let (rows, _) = whole(25, 60);
    let longer = |row: &mut Row| row.data = [&row.data[..], b"x"].concat().into();
    cases.push(("a row that is longer", with(&rows, 0, &longer), Misread::Damaged));
    let (mut rows, _) = whole(26, 3 * MAX_ROW);
    let (first, second) = (rows[1].data.clone(), rows[2].data.clone());
    (rows[1].data, rows[2].data) = (second, first);
    cases.push(("parts that were swapped", rows, Misread::Damaged));
    // Records at the place of another: number, epoch, stream, home.
    let foreign = |n: u64, from: Segment, from_n: u64| {
        let rows = cut(&record(from, from_n, 0, 60).0, home, n).unwrap();
        ("another's record", rows.to_vec(), Misread::Foreign)
    };
    cases.push(foreign(30, home, 31));
    cases.push(foreign(31, segment(0, 0, 2, 0), 31));
    cases.push(foreign(32, segment(0, 1, 1, 0), 32));
    cases.push(foreign(33, segment(1, 0, 1, 0), 33));
    // Formats: the sum is right.
    for (n, format, misread) in [(40, FORMAT + 1, Misread::Newer(FORMAT + 1)), (41, 0, Misread::Damaged)] {
        let rows = with(&whole(n, 60).0, 0, &|row| row.data = as_format(&row.data, format));
        cases.push(("another format", rows, misread));
    }
    for (_, rows, _) in &cases {
        insert(one, &owner(0, "a", 1), &rows.iter().cloned().collect()).await;
    }
    let found = read(other, home, (0, 0), 2 * PAGE).await;
    assert_eq!(by_number(&found).count(), cases.len());
    cases.sort_by_key(|(_, rows, _)| rows[0].n);
    for (rows, (name, _, misread)) in by_number(&found).zip(cases) {
        let n = rows[0].n;
        assert_eq!(assemble(home, n, rows).err(), Some(misread), "{name}, number {n}");
    }
}

/// A record as a version of another format would write it, with its right sum.
fn as_format(record: &Bytes, format: u8) -> Bytes {
    debug_assert!(decode(record).is_ok());
    let mut record = BytesMut::from(&record[..]);
    record[0] = format;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&record[..36]);
    hasher.update(&record[40..]);
    record[36..40].copy_from_slice(&hasher.finalize().to_le_bytes());
    record.freeze()
}

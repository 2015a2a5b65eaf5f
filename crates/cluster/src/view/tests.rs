use super::*;

fn node(name: &str) -> Node {
    Node::new(name, 7)
}

fn sealed(n: u64, segment: u32) -> Option<Sealed> {
    Some(Sealed { n, segment })
}

fn start(epoch: u64, n: u64, segment: u32) -> Start {
    Start { epoch, n, segment }
}

fn epochs(view: &View) -> Vec<u64> {
    view.homes[0].chain.iter().map(|ended| ended.epoch).collect()
}

/// Epoch 1 of `a` ended with these records; `b` owns epoch 2.
fn taken(vector: Vec<Option<Sealed>>) -> (View, Owner) {
    let (a, b) = (node("a"), node("b"));
    let view = View::create("c", 1, 2).take(0, &a).unwrap().take(0, &b).unwrap();
    let owner = b.owner(0, 2);
    (view.seal(&owner, &[vector]).unwrap(), owner)
}

#[test]
fn a_document_comes_back_with_its_owners() {
    let (mut view, owner) = taken(vec![sealed(3, 0), None]);
    view = view.accept_loss(0, 0, 1, 2).unwrap();
    let stored = view.store(9, 4).unwrap();
    assert_eq!((stored.cluster, stored.version, &stored.owners), (9, 4, &vec![owner]));
    assert_eq!(View::read(&stored), Ok(view.clone()));
    // Fields of a later version are passed over; its format is not.
    let text = String::from_utf8(stored.document.to_vec()).unwrap();
    let later = text.replacen('{', "{\"later\":[1],", 1);
    assert_eq!(View::read(&StoredView { document: later.into(), ..stored.clone() }), Ok(view));
    let newer = text.replacen("\"format\":1", "\"format\":2,\"homes\":null,\"x\":1", 1);
    assert_eq!(
        View::read(&StoredView { document: newer.into(), ..stored.clone() }),
        Err(ViewError::Newer(2))
    );
    for damaged in
        ["", "{}", "{\"format\":1}", &text[..text.len() - 1], &text.replace("\"streams\":2", "\"streams\":3")]
    {
        let damaged = View::read(&StoredView { document: damaged.to_owned().into(), ..stored.clone() });
        assert!(matches!(damaged, Err(ViewError::Unreadable(_))), "{damaged:?}");
    }
}

#[test]
fn a_home_is_taken_sealed_and_released() {
    let (a, b) = (node("a"), node("b"));
    let first = View::create("c", 2, 2).take(1, &a).unwrap();
    assert_eq!(first.owners(), [a.owner(1, 1)]);
    assert_eq!(first.homes[1].chain, [], "there was no epoch before it");
    assert_eq!(first.take(2, &a), Err(ViewError::NoHome(2)));
    let second = first.take(1, &b).unwrap();
    assert_eq!(second.owners(), [b.owner(1, 2)]);
    assert_eq!(second.homes[1].chain[0].sealed, None);
    let not_owner = Err(ViewError::NotOwner { home: 1, epoch: 2, owner: "b".to_owned() });
    assert_eq!(second.seal(&a.owner(1, 1), &[vec![None, None]]), not_owner);
    let vector = vec![sealed(4, 1), None];
    let third = second.seal(&b.owner(1, 2), std::slice::from_ref(&vector)).unwrap();
    assert_eq!(third.homes[1].chain[0].sealed, Some(vector.clone()));
    let again = third.seal(&b.owner(1, 2), &[vec![None, None]]).unwrap();
    assert_eq!(again, third, "an epoch is sealed once");
    let released = third.release(&b.owner(1, 2), vec![None, sealed(0, 0)]).unwrap();
    assert_eq!(released.owners(), []);
    assert_eq!(released.homes[1].chain[1].sealed, Some(vec![None, sealed(0, 0)]));
    let taken = released.take(1, &a).unwrap();
    assert_eq!((taken.owners(), taken.homes[1].chain.len()), (vec![a.owner(1, 3)], 2));
    let nobody = released.release(&b.owner(1, 2), Vec::new());
    assert_eq!(nobody, Err(ViewError::NotOwner { home: 1, epoch: 2, owner: "nobody".to_owned() }));
}

#[test]
fn epochs_without_records_leave_the_chain() {
    let (view, owner) = taken(vec![None, None]);
    assert_eq!(epochs(&view), [0_u64; 0]);
    assert_eq!(view.homes[0].starts, [start(2, 0, 0); 2], "nothing is in the ledger");
    let unsealed = [0, 1].map(|stream| Leftover { stream, epoch: 1, from: 0, to: 1 });
    assert_eq!(view.homes[0].leftovers, unsealed, "rows that count for nobody");
    let released = view.release(&owner, vec![None, None]).unwrap();
    assert_eq!((epochs(&released), released.homes[0].starts[0]), (Vec::new(), start(3, 0, 0)));
    // One that is between others goes, too.
    let (view, _) = taken(vec![sealed(0, 0), None]);
    let c = node("c");
    let view = view.take(0, &c).unwrap();
    let view = view.seal(&c.owner(0, 3), &[Vec::new(), vec![None, None]]).unwrap();
    assert_eq!(epochs(&view), [1]);
}

/// The failures: a view that an earlier version made cannot be read with a stream more; an epoch that ended before it has one.
#[test]
fn a_view_gets_further_streams() {
    let (view, owner) = taken(vec![sealed(3, 0), None]);
    let wide = view.widen(&owner, 3).unwrap();
    assert_eq!((wide.streams, wide.homes[0].starts[2]), (3, start(2, 0, 0)));
    assert_eq!(wide.homes[0].chain[0].sealed, Some(vec![sealed(3, 0), None, None]));
    assert_eq!(View::read(&wide.store(9, 4).unwrap()), Ok(wide.clone()));
    assert_eq!(wide.widen(&owner, 3).as_ref(), Ok(&wide));
    assert_eq!(wide.widen(&owner, 2).as_ref(), Ok(&wide), "none is taken away");
    assert!(matches!(view.widen(&node("a").owner(0, 1), 3), Err(ViewError::NotOwner { .. })));
    // The stream begins in the epoch of its first owner, and goes on as any other.
    let released = wide.release(&owner, vec![None, None, sealed(5, 0)]).unwrap();
    assert_eq!((epochs(&released), released.homes[0].starts[2]), (vec![1, 2], start(2, 0, 0)));
}

#[test]
fn a_start_moves_on_and_leaves_segments_to_be_deleted() {
    let (view, owner) = taken(vec![sealed(90, 5), sealed(8, 0)]);
    assert_eq!(view.homes[0].starts, [start(0, 0, 0), start(0, 0, 0)].map(|_| start(1, 0, 0)));
    let moved = view.publish_start(&owner, 0, start(1, 40, 3)).unwrap();
    assert_eq!(moved.homes[0].leftovers, [Leftover { stream: 0, epoch: 1, from: 0, to: 3 }]);
    let moved = moved.publish_start(&owner, 0, start(2, 7, 2)).unwrap();
    let leftovers =
        [(1, 0, 3), (1, 3, 7), (2, 0, 2)].map(|(epoch, from, to)| Leftover { stream: 0, epoch, from, to });
    assert_eq!(moved.homes[0].leftovers, leftovers);
    assert_eq!(epochs(&moved), [1], "the other stream needs it");
    let moved = moved.publish_start(&owner, 1, start(2, 0, 0)).unwrap();
    assert_eq!(epochs(&moved), [0_u64; 0]);
    let gone = moved.homes[0].leftovers.clone();
    assert_eq!(gone[3..], [Leftover { stream: 1, epoch: 1, from: 0, to: 2 }]);
    let deleted = moved.delete(&owner, &gone[1..]).unwrap();
    assert_eq!(deleted.homes[0].leftovers, gone[..1]);
    for (stream, place) in
        [(0, start(2, 7, 2)), (0, start(1, 50, 4)), (0, start(3, 0, 0)), (2, start(2, 9, 9))]
    {
        assert_eq!(moved.publish_start(&owner, stream, place), Err(ViewError::NoPlace(place)));
    }
    let other = node("a").owner(0, 2);
    assert!(matches!(moved.publish_start(&other, 0, start(2, 8, 2)), Err(ViewError::NotOwner { .. })));
}

/// The failure: an engine that takes no deletes makes the document grow until it no longer fits.
#[test]
fn leftovers_are_bounded() {
    let (mut view, owner) = taken(vec![sealed(0, 0), sealed(0, 0)]);
    for number in 1.. {
        match view.publish_start(&owner, 0, start(2, number, number as u32)) {
            Ok(next) => view = next,
            Err(error) => {
                assert_eq!(error, ViewError::Leftovers);
                break;
            }
        }
        assert!(view.homes[0].leftovers.len() <= MOST_LEFTOVERS);
    }
    // A takeover is never refused for it.
    let c = node("c");
    let view = view.take(0, &c).unwrap();
    let vectors = vec![vec![None, None]; view.homes[0].chain.len()];
    assert!(view.seal(&c.owner(0, 3), &vectors).is_ok());
}

#[test]
fn a_chain_grows_by_epochs_with_records_only() {
    let (mut view, _) = taken(vec![sealed(0, 0), None]);
    for epoch in 3..30 {
        let node = node(&format!("n{epoch}"));
        let vector = if epoch % 2 == 0 { vec![sealed(0, 0), None] } else { vec![None, None] };
        view = view.take(0, &node).unwrap();
        let vectors = vec![vector; view.homes[0].chain.len()];
        view = view.seal(&node.owner(0, epoch), &vectors).unwrap();
    }
    assert_eq!(view.homes[0].chain.len(), 14);
    assert!(view.homes[0].chain.iter().all(|ended| ended.epoch == 1 || ended.epoch % 2 == 1));
    // A round of cleaning makes it short.
    let owner = view.owners()[0].clone();
    let view = view.publish_start(&owner, 0, start(owner.epoch, 0, 0)).unwrap();
    assert_eq!(epochs(&view), [0_u64; 0]);
}

#[test]
fn a_loss_is_accepted_in_an_epoch_that_has_ended() {
    let (view, _) = taken(vec![sealed(9, 0), None]);
    let cut = view.accept_loss(0, 0, 1, 4).unwrap().accept_loss(0, 0, 1, 6).unwrap();
    assert_eq!(cut.homes[0].chain[0].last(0), sealed(3, 0));
    assert_eq!(view.accept_loss(0, 0, 1, 0).unwrap().homes[0].chain[0].last(0), None);
    assert_eq!(view.accept_loss(0, 0, 2, 0), Err(ViewError::NoEpoch(2)));
}

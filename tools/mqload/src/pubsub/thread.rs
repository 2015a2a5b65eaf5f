//! A load thread: its connections, the load, and what it leaves behind on the broker.

use super::{Gathered, Run};
use crate::client::{ConnectStats, Engine, Spec, State};
use crate::codec;
use crate::report::{merge_tally, tally};
use crate::worker::{Meter, Outcome, Plan, Worker};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// Body of a load thread; an error here is one of epoll itself.
pub(super) fn thread(run: &Run, tid: usize) -> std::io::Result<(Outcome, BTreeMap<String, u64>)> {
    let plan = run.plan;
    let mut eng = Engine::new(run.cfg.clone(), Some(run.sh.wakers[tid].clone()))?;
    let m = Meter::new(plan, run.sh, tid);
    let (np, ns) = (m.local_pubs(), m.local_subs());
    eng.set_source_base(tid * (np + ns));
    for i in 0..np {
        let id = i * plan.threads + tid;
        let client_id = format!("{}-p{id}", plan.prefix);
        eng.add(Spec { client_id, clean: run.args.clean, filter: None, deaf: false });
    }
    for j in 0..ns {
        let id = j * plan.threads + tid;
        eng.add(Spec {
            client_id: format!("{}-s{id}", plan.prefix),
            clean: run.args.clean,
            filter: Some((plan.filter(id), plan.sub_qos)),
            deaf: false,
        });
    }
    for id in (tid..plan.slow).step_by(plan.threads) {
        eng.add(Spec {
            client_id: format!("{}-d{id}", plan.prefix),
            clean: run.args.clean,
            filter: Some((plan.filter(id), plan.sub_qos)),
            deaf: true,
        });
    }
    let (readers, all) = (np + ns, eng.conns.len());
    let mut w = Worker::new(eng, m);
    // All subscriptions are there before the first publisher connects.
    for range in [np..all, 0..np] {
        let c = w.eng.establish(range, &run.pace, &mut w.m)?;
        w.eng.deafen(readers..all)?;
        run.gathered.lock().unwrap().connect.push(c);
        run.barrier.wait();
    }
    merge_tally(&mut run.gathered.lock().unwrap().failures, &w.eng.failures);
    run.gathered.lock().unwrap().limits(&w.eng, np, plan);
    run.barrier.wait(); // the controller looks at the result
    run.barrier.wait(); // and has set the times, or exit
    if !run.sh.exit.load(Relaxed) {
        w.load()?;
    }
    let drops = std::mem::take(&mut w.eng.drops);
    clean_up(&mut w, run, tid)?;
    Ok((w.finish(), drops))
}

/// Leaves nothing behind on the broker: retained messages, sessions.
fn clean_up(w: &mut Worker, run: &Run, tid: usize) -> std::io::Result<()> {
    let plan = run.plan;
    let (np, all) = (w.m.local_pubs(), w.eng.conns.len());
    // Subscribers first, so that they do not see what follows.
    w.eng.disconnect(np..all, true, &mut w.m)?;
    run.among_threads.wait();
    for i in 0..np {
        if plan.retain && w.eng.conns[i].state == State::Up {
            let mut b = Vec::new();
            codec::clear_retained(&mut b, plan.v5, &plan.topic(i * plan.threads + tid));
            w.eng.send(i, &b, &mut w.m);
        }
    }
    w.eng.disconnect(0..np, true, &mut w.m)?;
    if !run.args.clean && !plan.v5 {
        // 3.1.1: only a clean connection ends a persistent session.
        for c in &mut w.eng.conns {
            c.spec.clean = true;
            c.spec.filter = None;
        }
        w.eng.establish(0..all, &run.pace, &mut w.m)?;
        w.eng.disconnect(0..all, true, &mut w.m)?;
    }
    Ok(())
}

impl Gathered {
    pub(super) fn connect(&self) -> ConnectStats {
        let mut all = ConnectStats::new();
        self.connect.iter().for_each(|c| all.merge(c));
        all
    }

    /// Notes where CONNACK (v5) forbids what the run needs.
    fn limits(&mut self, eng: &Engine, np: usize, plan: &Plan) {
        for c in eng.conns[..np].iter().filter(|c| c.state == State::Up) {
            let k = &c.connack;
            self.receive_max = self.receive_max.min(k.receive_max);
            if k.max_qos < plan.qos {
                tally(&mut self.failures, "CONNACK: maximum QoS below --qos");
            } else if (k.max_packet as usize) < plan.size + plan.topic(0).len() + 16 {
                tally(&mut self.failures, "CONNACK: maximum packet size below --size");
            } else if plan.retain && !k.retain_available {
                tally(&mut self.failures, "CONNACK: retain not available");
            }
        }
    }
}

//! Cost of a hundred rules with placeholders per publish: with the decision remembered (hot) and made anew (cold).
//! `cargo bench -p access`

#[path = "../../../benches/support/rules.rs"]
mod ruled;

use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use ruled::Ruled;

/// Measures with `iters` repeats of a loop that counts for itself.
type Measured = fn(&Ruled, usize);

#[expect(clippy::disallowed_methods, reason = "it is what is measured")]
fn deciding(criterion: &mut Criterion) {
    let ruled = Ruled::new();
    let cases: [(&str, Measured); 2] = [("hot", Ruled::hot), ("cold", Ruled::cold)];
    for (name, work) in cases {
        criterion.bench_function(&format!("rules/100/{name}"), |bencher| {
            bencher.iter_custom(|iters| {
                let begin = Instant::now();
                work(&ruled, usize::try_from(iters).unwrap_or(usize::MAX));
                begin.elapsed()
            });
        });
    }
}

criterion_group!(benches, deciding);
criterion_main!(benches);

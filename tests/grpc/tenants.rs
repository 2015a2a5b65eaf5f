//! Tenants as operators see them.

use gateway_core::{Quotas, units::ByteSize};
use mqtt_server::proto::gateway::v1;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_listed_with_what_they_have_and_may_have() {
    let setup = Setup::with(|config| {
        let quotas = Quotas { connections: 5, byte_rate_out: ByteSize(1024), ..Quotas::default() };
        for name in ["acme", "tcp", "zeta", "*"] {
            config.tenants.insert(name.to_owned(), quotas.clone());
        }
    })
    .await;
    let list = async |size: i32, token: String| {
        let request = v1::ListTenantsRequest { page_size: size, page_token: token };
        setup.security().list_tenants(request).await.unwrap().into_inner()
    };
    let first = list(2, String::new()).await;
    let names: Vec<&str> = first.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    assert_eq!(names, ["acme", "tcp"], "any other is no name");
    let last = list(2, first.next_page_token).await;
    assert_eq!((last.tenants[0].name.as_str(), last.next_page_token.as_str()), ("zeta", ""));
    let mut device = setup.raw("d", |_| ());
    device.subscribe("x");
    let shown = list(0, String::new()).await.tenants;
    let tenant =
        shown.iter().find(|tenant| tenant.connections.unwrap().used > 0).expect("its listener's tenant");
    assert_eq!(tenant.connections, Some(v1::QuotaUsage { used: 1, quota: 5 }));
    assert_eq!(tenant.subscriptions, Some(v1::QuotaUsage { used: 1, quota: 0 }));
    assert_eq!((tenant.byte_rate_out, tenant.message_rate), (1024, 0));
}

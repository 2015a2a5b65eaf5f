//! Client certificates as identities.

use std::{fs, path::Path};

use mqtt_server::proto::gateway::v1::{self, devices_client::DevicesClient, state_client::StateClient};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tonic::{Code, Request, transport::Identity};

use super::audit::channel;
use crate::{harness::*, support::Server};

/// An authority of client certificates, whose own is in the directory.
struct Authority(Issuer<'static, KeyPair>);

impl Authority {
    fn new(dir: &Path) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "clients");
        let key = KeyPair::generate().unwrap();
        fs::write(dir.join("clients.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self(Issuer::new(params, key))
    }

    fn identity(&self, common_name: &str, dns: &[&str]) -> Identity {
        let names: Vec<String> = dns.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Identity::from_pem(certificate.pem(), key.serialize_pem())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_who_its_names_say() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path());
    let toml = format!(
        "grpc.client_ca = \"{}\"\n\
         [[backends.certificates]]\nname = \"*.ops.example.com\"\nrole = \"operator\"\ndevices = [\"dev-*\"]\n\
         [[backends.certificates]]\nname = \"meter reader\"\nrole = \"reader\"\ntopics = [\"a/#\"]\n",
        dir.path().join("clients.crt").display()
    );
    let server = Server::start_with(&[], &toml);
    let list = v1::ListDevicesRequest::default();
    let disconnect =
        |device: &str| v1::DisconnectDeviceRequest { device_id: device.to_owned(), ..Default::default() };

    let ops = authority.identity("somebody", &["host-1.ops.example.com"]);
    let mut ops = DevicesClient::new(channel(&server, Some(ops)).await);
    assert!(ops.list_devices(list.clone()).await.is_ok());
    assert_eq!(ops.disconnect_device(disconnect("dev-1")).await.unwrap_err().code(), Code::NotFound);
    let out = ops.disconnect_device(disconnect("other")).await.unwrap_err();
    assert_eq!(refusal(&out), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()));

    let reader = channel(&server, Some(authority.identity("meter reader", &[]))).await;
    let denied = DevicesClient::new(reader.clone()).disconnect_device(disconnect("dev-1")).await.unwrap_err();
    assert_eq!(refusal(&denied), (Code::PermissionDenied, "ROLE_DENIED".to_owned()));
    let mut state = StateClient::new(reader);
    let retained = |topic: &str| v1::GetRetainedRequest { topic: topic.to_owned() };
    assert_eq!(state.get_retained(retained("a/b")).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(refusal(&state.get_retained(retained("b")).await.unwrap_err()).1, "OUT_OF_SCOPE");
    // A caller with a token is the token's owner, or nobody.
    let mut both = Request::new(retained("a/b"));
    both.metadata_mut().insert("authorization", "Bearer mqs_x".parse().unwrap());
    assert_eq!(refusal(&state.get_retained(both).await.unwrap_err()).1, "CREDENTIALS_UNKNOWN");

    let unnamed = authority.identity("host-1.ops.example.org", &["ops.example.com"]);
    for identity in [Some(unnamed), None] {
        let mut nobody = DevicesClient::new(channel(&server, identity).await);
        let refused = nobody.list_devices(list.clone()).await.unwrap_err();
        assert_eq!(refusal(&refused), (Code::Unauthenticated, "CREDENTIALS_MISSING".to_owned()));
    }
}

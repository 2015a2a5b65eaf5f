//! Compiles the protos without protoc: messages, clients, and the descriptors of both packages.

use std::{env, error::Error, fs, path::PathBuf};

use protox::prost::Message as _;

include!("protos.rs");

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    let mut names = prost_build::Config::new();
    names.enable_type_names();
    tonic_prost_build::configure()
        .build_server(false)
        .bytes(".")
        .emit_rerun_if_changed(false)
        .compile_fds_with_config(descriptors, names)?;
    Ok(())
}

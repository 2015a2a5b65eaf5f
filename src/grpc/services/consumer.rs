//! `gateway.v1.Consumer`: members of consumer groups.

use tonic::{Request, Response, Status};

use crate::grpc::{
    Context,
    proto::{gateway::v1, server::consumer_server::Consumer},
    status::Error,
};

/// The service.
pub(in crate::grpc) struct ConsumerService {
    #[expect(dead_code, reason = "what it serves comes next")]
    pub(in crate::grpc) context: Context,
}

impl ConsumerService {
    /// Whether groups are offered.
    fn groups(&self) -> Result<(), Error> {
        Err(Error::GroupsOff("groups.enabled"))
    }
}

#[tonic::async_trait]
impl Consumer for ConsumerService {
    type ConsumeStream = tokio_stream::Empty<Result<crate::grpc::stream::RawMessage, Status>>;

    async fn consume(
        &self,
        _request: Request<tonic::Streaming<v1::ConsumeRequest>>,
    ) -> Result<Response<Self::ConsumeStream>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn fetch(
        &self,
        _request: Request<v1::FetchRequest>,
    ) -> Result<Response<v1::FetchResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn acknowledge(
        &self,
        _request: Request<v1::AcknowledgeRequest>,
    ) -> Result<Response<v1::AcknowledgeResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn modify_lease(
        &self,
        _request: Request<v1::ModifyLeaseRequest>,
    ) -> Result<Response<v1::ModifyLeaseResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }
}

//! `gateway.v1.Groups`: administration of consumer groups.

use tonic::{Request, Response, Status};

use crate::grpc::{
    Context,
    proto::{gateway::v1, server::groups_server::Groups},
    status::Error,
};

/// The service.
pub(in crate::grpc) struct GroupsService {
    #[expect(dead_code, reason = "what it serves comes next")]
    pub(in crate::grpc) context: Context,
}

impl GroupsService {
    /// Whether groups are offered.
    fn groups(&self) -> Result<(), Error> {
        Err(Error::GroupsOff("groups.enabled"))
    }
}

#[tonic::async_trait]
impl Groups for GroupsService {
    async fn create_group(
        &self,
        _request: Request<v1::CreateGroupRequest>,
    ) -> Result<Response<v1::CreateGroupResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn get_group(
        &self,
        _request: Request<v1::GetGroupRequest>,
    ) -> Result<Response<v1::GetGroupResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn list_groups(
        &self,
        _request: Request<v1::ListGroupsRequest>,
    ) -> Result<Response<v1::ListGroupsResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn update_group(
        &self,
        _request: Request<v1::UpdateGroupRequest>,
    ) -> Result<Response<v1::UpdateGroupResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn delete_group(
        &self,
        _request: Request<v1::DeleteGroupRequest>,
    ) -> Result<Response<v1::DeleteGroupResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn seek_group(
        &self,
        _request: Request<v1::SeekGroupRequest>,
    ) -> Result<Response<v1::SeekGroupResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn list_members(
        &self,
        _request: Request<v1::ListMembersRequest>,
    ) -> Result<Response<v1::ListMembersResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn list_pending(
        &self,
        _request: Request<v1::ListPendingRequest>,
    ) -> Result<Response<v1::ListPendingResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn list_dead_letters(
        &self,
        _request: Request<v1::ListDeadLettersRequest>,
    ) -> Result<Response<v1::ListDeadLettersResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn requeue_dead_letters(
        &self,
        _request: Request<v1::RequeueDeadLettersRequest>,
    ) -> Result<Response<v1::RequeueDeadLettersResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }

    async fn purge_dead_letters(
        &self,
        _request: Request<v1::PurgeDeadLettersRequest>,
    ) -> Result<Response<v1::PurgeDeadLettersResponse>, Status> {
        self.groups()?;
        Err(Error::Internal.into())
    }
}

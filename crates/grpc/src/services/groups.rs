//! `gateway.v1.Groups`: administration of consumer groups.

use std::sync::Arc;

use consumer_groups::{ConsumerGroups as All, GroupError, GroupStart, Info, PendingMessage, in_scope};
use gateway_core::{LogRecord, Partition};
use tonic::{Request, Response, Status};

use crate::{
    context::Context,
    proto::{gateway::v1, server::groups_server::Groups},
    server::{access::Call, deadline::within},
};
use grpc_messages::{
    convert,
    groups::{self, GroupUpdate},
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// The service.
pub(crate) struct GroupsService {
    pub(crate) context: Context,
}

/// The groups, if they are offered.
pub(super) fn offered(context: &Context) -> Result<&Arc<All>, Error> {
    match &context.hooks.groups {
        Ok(groups) => Ok(groups),
        Err(key) => Err(Error::GroupsOff(key)),
    }
}

/// Names the log, for ids of messages.
pub(super) fn log_id(context: &Context) -> u64 {
    context.broker.log().map_or(0, |log| log.id())
}

/// A valid name of a group with which the caller may have to do. Of a caller without limits it is not asked whether there is
/// one.
pub(super) fn name(context: &Context, call: &Call, field: &str, name: String) -> Result<String, Error> {
    let all = offered(context)?;
    let name = groups::name(field, name)?;
    call.about(&name);
    if call.scope().is_all() {
        return Ok(name);
    }
    match all.get(&name) {
        Ok(info) if info.is_within(call.scope()) => Ok(name),
        Ok(info) if in_scope(call.scope(), &info.definition.filter) => {
            Err(call.had_other_filters(field, &name))
        }
        // Nobody learns by it which groups others have.
        _ => Err(call.out_of_scope(field, &name)),
    }
}

/// As [`name`], of a group that is no bridge's: nobody else takes messages from a bridge, or changes what it carries.
pub(super) fn name_of_free(
    context: &Context,
    call: &Call,
    field: &str,
    group: String,
) -> Result<String, Error> {
    let group = name(context, call, field, group)?;
    if is_of_bridge(context, &group) { Err(Error::GroupOfBridge) } else { Ok(group) }
}

/// Tells whether the group is the queue of a bridge that is configured.
fn is_of_bridge(context: &Context, group: &str) -> bool {
    context.hooks.operated.bridges.own_group(group)
}

/// The error of a call about a group that `field` names.
pub(super) fn failed(call: &Call, field: &str, name: &str, error: GroupError) -> Error {
    match error {
        // The name may be another group's since the call began.
        GroupError::OutOfScope => call.out_of_scope(field, name),
        error => error.into(),
    }
}

impl GroupsService {
    fn all(&self) -> Result<&Arc<All>, Error> {
        offered(&self.context)
    }

    fn name(&self, call: &Call, name: String) -> Result<String, Error> {
        self::name(&self.context, call, "name", name)
    }

    /// Returns the outcome of a creation that is only to be checked.
    fn validate(&self, definition: &consumer_groups::Definition) -> Result<(), Error> {
        let all = self.all()?;
        let most = self.context.config.groups.max_groups;
        match all.get(&definition.name) {
            Ok(info) if info.definition == *definition => Ok(()),
            Ok(_) => Err(Error::GroupExists),
            Err(_) if all.list(None, most).len() >= most => Err(Error::TooManyGroups),
            Err(_) => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl Groups for GroupsService {
    async fn create_group(
        &self,
        request: Request<v1::CreateGroupRequest>,
    ) -> Result<Response<v1::CreateGroupResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let all = self.all()?;
        let (metadata, _, request) = request.into_parts();
        let v1::CreateGroupRequest { group, start, validate_only } = request;
        let mut group = group.ok_or_else(|| Error::invalid("group", "is missing"))?;
        group.name = groups::name("group.name", group.name)?;
        call.about(&group.name);
        let start = groups::position("start", start)?.unwrap_or(GroupStart::Latest);
        let context = &self.context;
        let definition = groups::definition(group, &context.config.groups, context.broker.limits())?;
        if !in_scope(call.scope(), &definition.filter) {
            return Err(call.out_of_scope("group.filter", &definition.name).into());
        }
        if is_of_bridge(context, &definition.name) {
            return Err(Error::GroupOfBridge.into());
        }
        if validate_only {
            self.validate(&definition)?;
            return Ok(Response::new(v1::CreateGroupResponse::default()));
        }
        let create = async { all.create(definition, &start).await.map_err(|error| at("start.token", error)) };
        let (info, token) = within(&metadata, context.config.wait_timeout, create).await?;
        if !info.is_within(call.scope()) {
            return Err(call.had_other_filters("group.filter", &info.definition.name).into());
        }
        Ok(Response::new(v1::CreateGroupResponse { group: Some(groups::group(&info)), token }))
    }

    async fn get_group(
        &self,
        request: Request<v1::GetGroupRequest>,
    ) -> Result<Response<v1::GetGroupResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let name = self.name(&call, request.into_inner().name)?;
        let info = self.all()?.get(&name).map_err(Error::from)?;
        Ok(Response::new(v1::GetGroupResponse { group: Some(groups::group(&info)) }))
    }

    async fn list_groups(
        &self,
        request: Request<v1::ListGroupsRequest>,
    ) -> Result<Response<v1::ListGroupsResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let all = self.all()?;
        let v1::ListGroupsRequest { page_size, page_token } = request.into_inner();
        let limit = convert::page_size(page_size)?;
        let pages = RequestPages::of("ListGroups", &v1::ListGroupsRequest::default());
        let after = pages.start(&page_token)?;
        let found = all.list(after.as_deref(), limit + 1);
        let more = found.len() > limit;
        let seen: &[Info] = &found[..found.len().min(limit)];
        let in_scope = seen.iter().filter(|info| info.is_within(call.scope()));
        let (groups, cut) = fit(in_scope.map(groups::group), PAGE_BYTES);
        let last = if cut { groups.last().map(|group| group.name.clone()) } else { None };
        let last = last.or_else(|| seen.last().filter(|_| more).map(|info| info.definition.name.clone()));
        let next_page_token = pages.token(last.as_deref());
        Ok(Response::new(v1::ListGroupsResponse { groups, next_page_token }))
    }

    async fn update_group(
        &self,
        request: Request<v1::UpdateGroupRequest>,
    ) -> Result<Response<v1::UpdateGroupResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let all = self.all()?;
        let (metadata, _, request) = request.into_parts();
        let mut group = request.group.ok_or_else(|| Error::invalid("group", "is missing"))?;
        let (named, etag) = (std::mem::take(&mut group.name), std::mem::take(&mut group.etag));
        let context = &self.context;
        let update =
            GroupUpdate::new(group, request.update_mask, &context.config.groups, context.broker.limits())?;
        let name = name(context, &call, "group.name", named)?;
        if is_of_bridge(context, &name) && !update.only_pauses() {
            return Err(Error::GroupOfBridge.into());
        }
        let info = all.get(&name).map_err(Error::from)?;
        let mut definition = info.definition;
        update.apply(&mut definition)?;
        // The change must apply to the version that was read just now, or another change would be undone.
        let etag = if etag.is_empty() { info.etag } else { etag };
        let update = async { Ok(all.update(definition, Some(&etag)).await?) };
        let info = within(&metadata, context.config.wait_timeout, update).await?;
        Ok(Response::new(v1::UpdateGroupResponse { group: Some(groups::group(&info)) }))
    }

    async fn delete_group(
        &self,
        request: Request<v1::DeleteGroupRequest>,
    ) -> Result<Response<v1::DeleteGroupResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let v1::DeleteGroupRequest { name, allow_missing } = request;
        let (all, name) = (self.all()?, name_of_free(&self.context, &call, "name", name)?);
        let delete = async { Ok(all.delete(&name).await?) };
        match within(&metadata, self.context.config.wait_timeout, delete).await {
            Err(Error::GroupNotFound) if allow_missing => {}
            other => other?,
        }
        Ok(Response::new(v1::DeleteGroupResponse {}))
    }

    async fn seek_group(
        &self,
        request: Request<v1::SeekGroupRequest>,
    ) -> Result<Response<v1::SeekGroupResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let v1::SeekGroupRequest { name, to } = request;
        let to = groups::position("to", to)?.ok_or_else(|| Error::invalid("to", "is missing"))?;
        let (all, name) = (self.all()?, self.name(&call, name)?);
        let seek = async {
            all.seek(&name, &to, call.scope()).await.map_err(|error| match error {
                GroupError::BadToken => at("to.token", error),
                error => failed(&call, "to", &name, error),
            })
        };
        let previous_token = within(&metadata, self.context.config.wait_timeout, seek).await?;
        Ok(Response::new(v1::SeekGroupResponse { previous_token }))
    }

    async fn list_members(
        &self,
        request: Request<v1::ListMembersRequest>,
    ) -> Result<Response<v1::ListMembersResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let name = self.name(&call, request.into_inner().name)?;
        let members = self.all()?.members(&name).map_err(Error::from)?;
        let members = members.into_iter().map(groups::member_to_proto).collect();
        Ok(Response::new(v1::ListMembersResponse { members }))
    }

    async fn list_pending(
        &self,
        request: Request<v1::ListPendingRequest>,
    ) -> Result<Response<v1::ListPendingResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, mut request) = request.into_parts();
        let limit = convert::page_size(std::mem::take(&mut request.page_size))?;
        let token = std::mem::take(&mut request.page_token);
        let pages = RequestPages::of("ListPending", &request);
        let after = pages.start(&token)?.map(|after| place(&after)).transpose()?;
        let name = self.name(&call, request.name)?;
        let all = self.all()?;
        let of_device = |record: Option<&LogRecord>| {
            let client_id = record.and_then(|record| record.message.client_id.as_ref());
            request.device_id.is_empty() || client_id.is_some_and(|id| id.as_str() == request.device_id)
        };
        let found = async {
            let found = all.pending(&name, call.scope(), after, limit, PAGE_BYTES, of_device).await;
            found.map_err(|error| failed(&call, "name", &name, error))
        };
        let found = within(&metadata, self.context.config.wait_timeout, found).await?;
        let log = log_id(&self.context);
        let pending = found.messages.iter().map(|message| groups::pending(message, log));
        let (messages, cut) = fit(pending, PAGE_BYTES);
        let shown = found.messages.get(messages.len().saturating_sub(1)).filter(|_| cut);
        let last = shown.map(|PendingMessage { pending, .. }| (pending.partition, pending.offset));
        let last = last.or(found.last).map(|(partition, offset)| format!("{}.{offset}", partition.0));
        let next_page_token = pages.token(last.as_deref());
        Ok(Response::new(v1::ListPendingResponse { messages, next_page_token }))
    }

    async fn list_dead_letters(
        &self,
        request: Request<v1::ListDeadLettersRequest>,
    ) -> Result<Response<v1::ListDeadLettersResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, mut request) = request.into_parts();
        let limit = convert::page_size(std::mem::take(&mut request.page_size))?;
        let token = std::mem::take(&mut request.page_token);
        let pages = RequestPages::of("ListDeadLetters", &request);
        let after = pages.start(&token)?.map(|after| after.parse::<u64>()).transpose();
        let after = after.map_err(|_| Error::PageTokenInvalid)?;
        let (all, name) = (self.all()?, self.name(&call, request.name)?);
        let found = async {
            let found = all.dead_letters(&name, call.scope(), after, limit + 1).await;
            found.map_err(|error| failed(&call, "name", &name, error))
        };
        let found = within(&metadata, self.context.config.wait_timeout, found).await?;
        // A read ends early where letters are large, so the number of letters says nothing about the rest.
        let newest = all.newest_dead_letter(&name).map_err(Error::from)?;
        let seen = &found[..found.len().min(limit)];
        // Some may have come under another filter.
        let in_scope = seen.iter().filter(|letter| call.scope().is_all() || letter.matches);
        let (dead_letters, cut) = fit(in_scope.map(groups::dead_letter), PAGE_BYTES);
        let shown = dead_letters.last().filter(|_| cut).map(|letter| letter.id.clone());
        let last = shown.or_else(|| seen.last().map(|letter| letter.id.to_string()));
        let has_more =
            |last: &String| last.parse().is_ok_and(|last: u64| newest.is_some_and(|newest| newest > last));
        let next_page_token = pages.token(last.filter(has_more).as_deref());
        Ok(Response::new(v1::ListDeadLettersResponse { dead_letters, next_page_token }))
    }

    async fn requeue_dead_letters(
        &self,
        request: Request<v1::RequeueDeadLettersRequest>,
    ) -> Result<Response<v1::RequeueDeadLettersResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let v1::RequeueDeadLettersRequest { name, ids } = request;
        let ids = groups::letter_ids(&ids)?;
        let (all, name) = (self.all()?, self.name(&call, name)?);
        let requeue = async {
            let count = all.requeue(&name, &ids, call.scope()).await;
            count.map_err(|error| failed(&call, "name", &name, error))
        };
        let count = within(&metadata, self.context.config.wait_timeout, requeue).await?;
        Ok(Response::new(v1::RequeueDeadLettersResponse { count }))
    }

    async fn purge_dead_letters(
        &self,
        request: Request<v1::PurgeDeadLettersRequest>,
    ) -> Result<Response<v1::PurgeDeadLettersResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let v1::PurgeDeadLettersRequest { name, ids } = request;
        let ids = groups::letter_ids(&ids)?;
        let (all, name) = (self.all()?, self.name(&call, name)?);
        let purge = async {
            let count = all.purge(&name, &ids, call.scope()).await;
            count.map_err(|error| failed(&call, "name", &name, error))
        };
        let count = within(&metadata, self.context.config.wait_timeout, purge).await?;
        Ok(Response::new(v1::PurgeDeadLettersResponse { count }))
    }
}

/// An error of a call whose position has its token in `field`.
fn at(field: &str, error: GroupError) -> Error {
    match error {
        GroupError::BadToken => Error::invalid(field, "is not one of this gateway's tokens"),
        error => error.into(),
    }
}

/// Parses the place at which a page of pending messages begins.
fn place(text: &str) -> Result<(Partition, u64), Error> {
    let (partition, offset) = text.split_once('.').ok_or(Error::PageTokenInvalid)?;
    let partition = partition.parse().map_err(|_| Error::PageTokenInvalid)?;
    Ok((Partition(partition), offset.parse().map_err(|_| Error::PageTokenInvalid)?))
}

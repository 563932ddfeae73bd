//! A request from its head to its first pick.
//!
//! Every arrival leaves a receipt. From the first pick on, picks and
//! [`super::answer::Watch`] see to it; before, [`Arrival`] does, also when the
//! client goes away and the request is dropped where it stands.

use std::sync::Arc;

use super::errors::ClientError;
use crate::pool::Pool;
use crate::route;

/// A request that has no receipt yet; dropping it files one.
#[derive(Debug)]
pub struct Arrival {
    pool: Arc<Pool>,
    /// The request's id.
    pub request_id: Arc<str>,
    filed: bool,
}

impl Arrival {
    /// A request that has just come.
    pub fn new(pool: &Arc<Pool>, request_id: Arc<str>) -> Self {
        Self { pool: Arc::clone(pool), request_id, filed: false }
    }

    /// A pick has filed its receipt.
    pub fn picked(&mut self) {
        self.filed = true;
    }

    /// It was refused before a pick.
    pub fn refused(&mut self, error: &ClientError) {
        self.file(error.status().as_u16(), error.code());
    }

    fn file(&mut self, status: u16, failure: &'static str) {
        if !std::mem::replace(&mut self.filed, true) {
            route::file_rejection(&self.pool, Arc::clone(&self.request_id), status, failure);
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.file(0, "client_gone");
    }
}

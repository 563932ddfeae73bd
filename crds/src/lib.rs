//! Types shared by the operator and the router.

//! Why a router's pod does not run, by what the kubelet and the scheduler say.
//! Pure.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use kvrouter_crds::conditions::Reason;

use crate::facts::{self, RouterPod, is_ready};

/// Exit code of a router that refuses its settings.
const REFUSED_SETTINGS: i32 = 2;

/// Why a pod does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// The pod.
    pub pod: String,
    /// A reason of `RouterAvailable`.
    pub reason: Reason,
    /// What the kubelet or the scheduler says.
    pub message: String,
    /// What the router said when it refused its settings; none for other troubles.
    pub refusal: Option<String>,
}

/// What is wrong with the pod; none if it is ready or just starting.
pub fn trouble(router: &RouterPod) -> Option<Trouble> {
    let pod = &router.pod;
    if is_ready(pod) {
        return None;
    }
    let found = of_containers(pod).or_else(|| of_scheduler(pod)).or_else(|| of_warnings(router));
    let (reason, message, refusal) = found?;
    Some(Trouble { pod: facts::name(pod).to_owned(), reason, message, refusal })
}

type Found = (Reason, String, Option<String>);

fn of_containers(pod: &Pod) -> Option<Found> {
    let status = pod.status.as_ref()?;
    let all =
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    all.filter_map(of_container).next()
}

fn of_container(container: &ContainerStatus) -> Option<Found> {
    let state = container.state.as_ref();
    let waiting = state.and_then(|state| state.waiting.as_ref());
    let reason = waiting.and_then(|waiting| waiting.reason.as_deref()).unwrap_or_default();
    let message = waiting.and_then(|waiting| waiting.message.clone()).unwrap_or_default();
    let last = container.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    match reason {
        "ErrImagePull"
        | "ImagePullBackOff"
        | "InvalidImageName"
        | "ErrImageNeverPull"
        | "RegistryUnavailable"
        | "ImageInspectError"
        | "SignatureValidationFailed" => {
            let image = &container.image;
            Some((Reason::ImagePullFailed, format!("{reason} of {image}: {message}"), None))
        }
        "CreateContainerConfigError"
        | "CreateContainerError"
        | "RunContainerError"
        | "PreCreateHookError" => {
            Some((missing_object(&message).unwrap_or(Reason::ConfigError), message, None))
        }
        "CrashLoopBackOff" => Some(crash(container, last)),
        _ => {
            // Between two attempts it runs, or has just ended.
            let ended = state.and_then(|state| state.terminated.as_ref()).or(last);
            (container.restart_count != 0 || ended.is_some_and(|ended| ended.exit_code != 0))
                .then(|| crash(container, ended))
        }
    }
}

fn crash(container: &ContainerStatus, ended: Option<&ContainerStateTerminated>) -> Found {
    let restarts = container.restart_count;
    let Some(ended) = ended else {
        return (Reason::CrashLooping, format!("it was started {restarts} times"), None);
    };
    let said = last_line(ended.message.as_deref().unwrap_or_default());
    let why = ended.reason.as_deref().unwrap_or("Error");
    let code = ended.exit_code;
    let text = if said.is_empty() { format!("{why}, exit code {code}") } else { said.to_owned() };
    let refusal = (code == REFUSED_SETTINGS && !said.is_empty()).then(|| said.to_owned());
    (Reason::CrashLooping, text, refusal)
}

/// The end of what a container wrote before it ended.
fn last_line(text: &str) -> &str {
    text.trim_end().lines().next_back().unwrap_or_default().trim()
}

fn of_scheduler(pod: &Pod) -> Option<Found> {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut scheduled = conditions.filter(|condition| condition.type_ == "PodScheduled");
    let refused = scheduled.find(|condition| condition.status == "False")?;
    let message = refused.message.clone().unwrap_or_default();
    Some((missing_object(&message).unwrap_or(Reason::Unschedulable), message, None))
}

/// Volumes that cannot be mounted are told by events only. They are believed
/// while no container has started.
fn of_warnings(router: &RouterPod) -> Option<Found> {
    let status = router.pod.status.as_ref();
    let containers = status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let started =
        |container: &ContainerStatus| container.started == Some(true) || container.container_id.is_some();
    if containers.into_iter().any(started) {
        return None;
    }
    let mut about_volumes = router.warnings.iter().filter(|warning| {
        matches!(warning.reason.as_str(), "FailedMount" | "FailedAttachVolume" | "FailedMapVolume")
    });
    let warning = about_volumes.next()?;
    let reason = missing_object(&warning.message).unwrap_or(Reason::MountFailed);
    Some((reason, warning.message.clone(), None))
}

/// The kind of object that is missing, in the kubelet's and the scheduler's words.
fn missing_object(message: &str) -> Option<Reason> {
    let text = message.to_ascii_lowercase();
    let is_missing =
        text.contains("not found") || text.contains("couldn't find key") || text.contains("non-existent");
    if !is_missing {
        return None;
    }
    // "persistentvolumeclaim" first: the name of a claim may hold the other words.
    let kinds = [
        ("persistentvolumeclaim", Reason::ClaimNotFound),
        ("secret", Reason::SecretNotFound),
        ("configmap", Reason::ConfigMapNotFound),
        ("config key", Reason::ConfigMapNotFound),
    ];
    kinds.into_iter().find(|(word, _)| text.contains(word)).map(|(_, reason)| reason)
}

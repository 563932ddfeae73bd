//! A real etcd and kube-apiserver on free loopback ports, for one test program.
//!
//! There is no kubelet and no controller manager: tests play their part. A shell
//! holds both processes and ends them when this process is gone, however it
//! went; nothing is left behind.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Who the operator is to the API server.
pub(crate) const OPERATOR: &str = "system:serviceaccount:kvrouter-system:kvrouter-operator";
/// The same, with rights in some namespaces only.
pub(crate) const NAMESPACED: &str = "system:serviceaccount:kvrouter-system:namespaced";
/// How long a control plane may take to come up on a busy machine.
const START: Duration = Duration::from_secs(120);

/// Holds both processes until its standard input ends, then removes all traces.
const KEEPER: &str = r#"
"$BIN/etcd" --data-dir "$DIR/etcd" --unsafe-no-fsync --log-level error \
  --listen-client-urls "http://127.0.0.1:$ETCD" --advertise-client-urls "http://127.0.0.1:$ETCD" \
  --listen-peer-urls "http://127.0.0.1:$PEER" --initial-advertise-peer-urls "http://127.0.0.1:$PEER" \
  --initial-cluster "default=http://127.0.0.1:$PEER" >"$DIR/etcd.log" 2>&1 &
etcd=$!
api() {
  "$BIN/kube-apiserver" --etcd-servers "http://127.0.0.1:$ETCD" --bind-address 127.0.0.1 --secure-port "$API" \
    --cert-dir "$DIR/certs" --service-cluster-ip-range 198.18.128.0/17 --token-auth-file "$DIR/tokens.csv" \
    --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$DIR/sa.pub" \
    --service-account-signing-key-file "$DIR/sa.key" --authorization-mode RBAC \
    --disable-admission-plugins ServiceAccount --enable-admission-plugins OwnerReferencesPermissionEnforcement \
    --audit-policy-file "$DIR/audit.json" --audit-log-path "$DIR/audit.log" --audit-log-mode blocking \
    --endpoint-reconciler-type none --enable-priority-and-fairness=false --profiling=false \
    >>"$DIR/api.log" 2>&1 &
  api=$!
}
api
while read -r order; do
  case "$order" in
    stop) kill -9 "$api"; wait "$api" 2>/dev/null ;;
    start) api ;;
  esac
done
kill -9 "$api" "$etcd" 2>/dev/null
wait 2>/dev/null
rm -rf "$DIR"
"#;

/// A running control plane.
pub(crate) struct ControlPlane {
    folder: PathBuf,
    binaries: PathBuf,
    port: u16,
    keeper: std::sync::Mutex<Child>,
}

impl ControlPlane {
    /// The one that all tests share which do not stop it.
    pub(crate) fn shared() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(|| {
            let plane = Self::start("shared");
            plane.install();
            plane
        })
    }

    /// A fresh one, without our definitions.
    pub(crate) fn start(name: &str) -> Self {
        let binaries = binaries();
        let folder = std::env::temp_dir().join(format!("kvrouter-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for the control plane");
        write_secrets(&folder);
        let (etcd, peer, port) = (free_port(), free_port(), free_port());
        let keeper = Command::new("sh")
            .args(["-c", KEEPER])
            .env("BIN", &binaries)
            .env("DIR", &folder)
            .env("ETCD", etcd.to_string())
            .env("PEER", peer.to_string())
            .env("API", port.to_string())
            .stdin(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let plane = Self { folder, binaries, port, keeper: keeper.into() };
        plane.write_kubeconfig("admin", "admin-token");
        plane.write_kubeconfig("operator", "operator-token");
        plane.write_kubeconfig("namespaced", "namespaced-token");
        plane.await_ready();
        plane.kubectl_ok(&["apply", "-f", &rights().to_string_lossy()], None);
        plane
    }

    /// Installs the definitions as users do.
    pub(crate) fn install(&self) {
        let folder = manifest_folder().join("../crds/yaml");
        let apply = ["apply", "--server-side", "--force-conflicts", "-f", &folder.to_string_lossy()];
        self.kubectl_ok(&apply, None);
        let names = ["crd/kvrouters.kvrouter.dev", "crd/kvinferencepools.kvrouter.dev"];
        self.kubectl_ok(&["wait", "--for=condition=Established", names[0], names[1]], None);
    }

    /// Kills the API server, or starts it again.
    pub(crate) fn order(&self, order: &str) {
        use std::io::Write;
        let mut keeper = self.keeper.lock().expect("no test panicked in here");
        let stdin = keeper.stdin.as_mut().expect("piped");
        writeln!(stdin, "{order}").expect("the keeper listens");
    }

    pub(crate) fn await_ready(&self) {
        let began = Instant::now();
        while !self.kubectl(&["get", "--raw", "/readyz"], None).0 {
            let log = fs::read_to_string(self.folder.join("api.log")).unwrap_or_default();
            assert!(began.elapsed() < START, "the API server does not come up: {log}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.folder.join(format!("{user}.kubeconfig"))
    }

    /// A client with all rights.
    pub(crate) async fn client(&self) -> Client {
        let file = Kubeconfig::read_from(self.kubeconfig("admin")).expect("a kubeconfig");
        let mut config =
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.expect("a config");
        config.accept_invalid_certs = true;
        Client::try_from(config).expect("a client")
    }

    /// Whether kubectl succeeded, and everything it said.
    pub(crate) fn kubectl(&self, arguments: &[&str], input: Option<&str>) -> (bool, String) {
        use std::io::Write;
        let mut child = Command::new(self.binaries.join("kubectl"))
            .arg("--kubeconfig")
            .arg(self.kubeconfig("admin"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(input.unwrap_or_default().as_bytes()).expect("kubectl reads");
        drop(stdin);
        let output = child.wait_with_output().expect("kubectl ends");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    #[track_caller]
    pub(crate) fn kubectl_ok(&self, arguments: &[&str], input: Option<&str>) -> String {
        let (success, said) = self.kubectl(arguments, input);
        assert!(success, "kubectl {arguments:?}: {said}");
        said
    }

    /// Writes of the operator in `namespace`, as `verb resource/name`.
    pub(crate) fn writes(&self, namespace: &str) -> Vec<String> {
        let log = fs::read_to_string(self.folder.join("audit.log")).expect("an audit log");
        let event = |line: &str| -> Option<String> {
            let event: serde_json::Value = serde_json::from_str(line).ok()?;
            let text = |path: &str| event.pointer(path).and_then(serde_json::Value::as_str);
            if text("/user/username") != Some(OPERATOR) || text("/objectRef/namespace") != Some(namespace) {
                return None;
            }
            let sub = text("/objectRef/subresource").map_or_else(String::new, |sub| format!("/{sub}"));
            let (verb, resource) = (text("/verb")?, text("/objectRef/resource")?);
            Some(format!("{verb} {resource}{sub}/{}", text("/objectRef/name").unwrap_or("")))
        };
        log.lines().filter_map(event).filter(|write| !write.contains(" leases")).collect()
    }

    fn write_kubeconfig(&self, user: &str, token: &str) {
        let server = format!("https://127.0.0.1:{}", self.port);
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": true}}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        });
        fs::write(self.kubeconfig(user), config.to_string()).expect("a kubeconfig");
    }
}

/// The operator's rights: what the chart must grant, no more.
fn rights() -> PathBuf {
    manifest_folder().join("tests/cluster/rights.json")
}

pub(crate) fn manifest_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A user may do nothing but what its roles say; audit events say who wrote what.
fn write_secrets(folder: &Path) {
    let tokens = format!(
        "admin-token,admin,1,\"system:masters\"\noperator-token,{OPERATOR},2\nnamespaced-token,{NAMESPACED},3\n"
    );
    fs::write(folder.join("tokens.csv"), tokens).expect("tokens");
    let policy = serde_json::json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "users": [OPERATOR],
            "verbs": ["create", "update", "patch", "delete", "deletecollection"]}, {"level": "None"}],
    });
    fs::write(folder.join("audit.json"), policy.to_string()).expect("a policy");
    let openssl = |arguments: &[&str]| {
        let output =
            Command::new("openssl").args(arguments).current_dir(folder).output().expect("openssl starts");
        assert!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    };
    openssl(&["genrsa", "-out", "sa.key", "2048"]);
    openssl(&["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"]);
}

/// Where etcd, kube-apiserver and kubectl are.
fn binaries() -> PathBuf {
    let named = std::env::var_os("KVROUTER_KUBE_BIN").map(PathBuf::from);
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map_or_else(PathBuf::new, PathBuf::from);
    let usual = cache.unwrap_or_else(|| home.join(".cache")).join("kvrouter/tools/cluster/bin");
    let folder = named.unwrap_or(usual);
    for name in ["etcd", "kube-apiserver", "kubectl"] {
        let file = folder.join(name);
        assert!(
            file.exists(),
            "{} is missing: run `make test`, which installs it once, or name a folder with etcd, kube-apiserver and \
             kubectl in KVROUTER_KUBE_BIN",
            file.display()
        );
    }
    folder
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

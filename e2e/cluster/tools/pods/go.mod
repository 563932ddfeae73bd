// Two small programs that run in pods, built by ../../build.sh; they need nothing but Go's own library.
module kvrouter.local/e2e/cluster/pods

go 1.26.0

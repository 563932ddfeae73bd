// Probe stands at both ends of a connection between pods: it answers over HTTP with its name, or asks such a server.
//
//	probe serve TEXT     listens on :8080; GET / answers "TEXT POD", GET /healthz answers "ok"
//	probe get URL        prints the answer; fails unless its status is 200
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const (
	address = ":8080"
	// How long a request may take, which is also how long open ones are waited for at the end.
	patience = 5 * time.Second
	// Served on after SIGTERM: for so long Services may still send connections to a pod that is going away.
	linger = 2 * time.Second
)

func main() {
	if len(os.Args) != 3 {
		fail(fmt.Errorf("usage: probe serve TEXT | probe get URL"))
	}
	switch os.Args[1] {
	case "serve":
		fail(serve(os.Args[2]))
	case "get":
		fail(get(os.Args[2]))
	default:
		fail(fmt.Errorf("unknown command %q", os.Args[1]))
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func serve(text string) error {
	pod, err := os.Hostname()
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Println("request from", r.RemoteAddr)
		fmt.Fprintln(w, text, pod)
	})
	server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: patience}
	told, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	stopped := make(chan error, 1)
	go func() {
		<-told.Done()
		time.Sleep(linger)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		stopped <- server.Shutdown(ctx)
	}()
	fmt.Println("listening on", address)
	if err := server.ListenAndServe(); err != http.ErrServerClosed {
		return err
	}
	return <-stopped
}

func get(url string) error {
	client := &http.Client{Timeout: patience}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, answer.Status)
	}
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}

// Package apiserver sends requests to the Kubernetes API server, with the credentials that the kubelet gives a pod.
//
// It uses net/http and knows no objects: each caller has small types of its own with what it needs. client-go would
// add 17 MB to the program, and the types of k8s.io/api already 5 MB.
package apiserver

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
)

// Component is the name of this program in requests and in objects.
const Component = "gpu-cdi-plugin"

// The content types of requests.
const (
	JSON           = "application/json"
	StrategicMerge = "application/strategic-merge-patch+json"
)

const (
	// maxObject bounds an answer with an object or a list, in bytes. etcd stores at most 1.5 MB for an object.
	maxObject = 16 << 20
	// maxError bounds how much of an answer with an error is read, and maxHeader the headers of an answer, in bytes.
	maxError  = 16 << 10
	maxHeader = 64 << 10
	// maxCredential bounds a token or a certificate file, in bytes.
	maxCredential = 1 << 20
	// maxIdle is how many idle connections are kept. If a node's eight GPUs get new pods at once, eight claims are read at
	// once. Each would take its time mostly for the TLS handshake otherwise.
	maxIdle = 8
	// maxMessage bounds the message of an error, in bytes.
	maxMessage = 1024
)

// Options are the parameters of a Client.
type Options struct {
	// Credentials is the directory with the token and the ca.crt of a service account.
	Credentials string
	// Env has the variables KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, which the kubelet sets, and NODE_NAME.
	Env []string
	// Timeout limits a request, including its connection.
	Timeout time.Duration
	// KeepIdle is how long a connection is kept for the next request, of up to eight connections. If it is 0, each request
	// has a connection of its own.
	KeepIdle time.Duration
}

// Client sends requests to the API server as a service account. Its methods may be called concurrently.
type Client struct {
	// Node is the name of the node on which the program runs.
	Node string

	address           string // host:port
	dir               string // has the service account's token and ca.crt
	timeout, keepIdle time.Duration

	mu          sync.Mutex
	ca          []byte // with which `connections` was made
	connections *http.Transport
}

// New returns a Client. An error means that the program was started without credentials.
func New(o Options) (*Client, error) {
	env := map[string]string{}
	for _, kv := range o.Env {
		if name, value, ok := strings.Cut(kv, "="); ok {
			env[name] = value
		}
	}
	const host, port, nodeName = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NODE_NAME"
	for _, name := range []string{host, port, nodeName} {
		if env[name] == "" {
			return nil, fmt.Errorf("the environment variable %s is not set", name)
		}
	}
	c := &Client{
		Node: env[nodeName], address: net.JoinHostPort(env[host], env[port]), dir: o.Credentials,
		timeout: o.Timeout, keepIdle: o.KeepIdle,
	}
	if _, _, err := c.credentials(); err != nil {
		return nil, err
	}
	return c, nil
}

// StatusError means that the API server answered with a status other than success.
type StatusError struct {
	Code    int // of HTTP
	Message string
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("the API server answers %d: %s", e.Code, e.Message)
}

// Answered reports whether an error means that the API server answered with one of these status codes.
func Answered(err error, codes ...int) bool {
	status, ok := errors.AsType[*StatusError](err)
	return ok && slices.Contains(codes, status.Code)
}

// credentials reads the token, and the connections to a server whose certificate one of the authorities in ca.crt has
// signed. The kubelet replaces both files from time to time.
func (c *Client) credentials() (token string, connections *http.Transport, err error) {
	data, err := fileio.ReadFile(filepath.Join(c.dir, "token"), maxCredential)
	if err != nil {
		return "", nil, fmt.Errorf("read the service account's token: %w", err)
	}
	if token = strings.TrimSpace(string(data)); token == "" {
		return "", nil, fmt.Errorf("read the service account's token: %s is empty", filepath.Join(c.dir, "token"))
	}
	path := filepath.Join(c.dir, "ca.crt")
	if data, err = fileio.ReadFile(path, maxCredential); err != nil {
		return "", nil, fmt.Errorf("read the certificates of the API server's CA: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connections != nil && bytes.Equal(data, c.ca) {
		return token, c.connections, nil
	}
	ca := x509.NewCertPool()
	if !ca.AppendCertsFromPEM(data) {
		return "", nil, fmt.Errorf("read the certificates of the API server's CA: %s has none", path)
	}
	if c.connections != nil {
		c.connections.CloseIdleConnections()
	}
	c.ca = data
	c.connections = &http.Transport{
		DialContext:            (&net.Dialer{}).DialContext,
		TLSClientConfig:        &tls.Config{RootCAs: ca, MinVersion: tls.VersionTLS12},
		DisableKeepAlives:      c.keepIdle == 0,
		IdleConnTimeout:        c.keepIdle,
		MaxIdleConnsPerHost:    maxIdle,
		MaxResponseHeaderBytes: maxHeader,
	}
	return token, c.connections, nil
}

// Send sends an object and returns nil if the API server accepted it.
func (c *Client) Send(ctx context.Context, method, path, contentType string, object any) error {
	return c.Do(ctx, method, path, contentType, object, nil)
}

// Get reads an object or a list.
func (c *Client) Get(ctx context.Context, path string, into any) error {
	return c.Do(ctx, http.MethodGet, path, "", nil, into)
}

// Do sends an object, or none if it is nil, and reads the answer into another one, unless that is nil.
func (c *Client) Do(ctx context.Context, method, path, contentType string, object, into any) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	answer, err := c.send(ctx, method, path, contentType, object)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if into == nil {
		return nil
	}
	data, err := io.ReadAll(io.LimitReader(answer.Body, maxObject+1))
	switch {
	case err != nil:
		return fmt.Errorf("read the API server's answer: %w", err)
	case len(data) > maxObject:
		return fmt.Errorf("read the API server's answer: it has more than %d bytes", maxObject)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read the API server's answer: %w", wording.Limit(err)) // it can quote the answer
	}
	return nil
}

// AwaitChange waits until an object changes that a watch at this path covers, or the API server ends the watch. It
// also returns nil when the limit is over: the connection may be broken, and the server's end is not noticed then.
func (c *Client) AwaitChange(ctx context.Context, path string, limit time.Duration) error {
	watching, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	unanswered := time.AfterFunc(c.timeout, cancel)
	answer, err := c.send(watching, http.MethodGet, path, "", nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	unanswered.Stop()
	_, _ = answer.Body.Read(make([]byte, 1)) // the first byte of an event, or the end of the watch
	return ctx.Err()
}

// send sends an object, or none, and returns an answer that means success. No proxy is used and no redirection
// followed, since neither may get the token.
func (c *Client) send(ctx context.Context, method, path, contentType string, object any) (*http.Response, error) {
	token, connections, err := c.credentials()
	if err != nil {
		return nil, err
	}
	var body []byte
	if object != nil {
		if body, err = json.Marshal(object); err != nil {
			return nil, fmt.Errorf("write %T as JSON: %w", object, err)
		}
	}
	q, err := http.NewRequestWithContext(ctx, method, "https://"+c.address+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make a request for the API server: %w", err)
	}
	q.Header.Set("Authorization", "Bearer "+token)
	if contentType != "" {
		q.Header.Set("Content-Type", contentType)
	}
	q.Header.Set("Accept", JSON)
	q.Header.Set("User-Agent", Component)
	sender := http.Client{
		Transport:     connections,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	answer, err := sender.Do(q)
	if err != nil {
		return nil, fmt.Errorf("call the API server: %w", err)
	}
	if answer.StatusCode/100 == 2 {
		return answer, nil
	}
	defer answer.Body.Close()
	return nil, &StatusError{answer.StatusCode, message(answer)}
}

// message returns the API server's reason for an error: the message of a Status object, or the HTTP status.
func message(answer *http.Response) string {
	data, _ := io.ReadAll(io.LimitReader(answer.Body, maxError))
	var status struct{ Message string }
	_ = json.Unmarshal(data, &status)
	return cmp.Or(wording.Shorten(status.Message, maxMessage), answer.Status)
}

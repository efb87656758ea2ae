// Package apiservertest has an API server in memory, for tests of programs on a node. It serves TLS with its own CA,
// and accepts Events, patches of a Node's conditions and ResourceSlices like the API server of Kubernetes. Tests can
// make it misbehave.
package apiservertest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Node is the name of the Node object.
const Node = "gpu-node-1"

// Condition is a condition of the Node.
type Condition struct {
	Type, Status, Reason, Message string
	LastHeartbeatTime             time.Time
	LastTransitionTime            time.Time
}

// Event is an Event of core/v1 with the fields that the tests need.
type Event struct {
	APIVersion, Kind string
	Metadata         struct{ Name, Namespace string }
	InvolvedObject   struct{ APIVersion, Kind, Name, Namespace, UID string }
	Source           struct{ Component, Host string }
	Type             string
	Reason, Message  string
	Count            int
	FirstTimestamp   time.Time
	LastTimestamp    time.Time

	ReportingComponent, ReportingInstance string
}

// Server is an API server with one Node. Its methods may be called concurrently.
type Server struct {
	// Dir has the token and the ca.crt of the service account.
	Dir string

	t      testing.TB
	server *httptest.Server

	mu sync.Mutex
	resources
	token      string
	requests   int
	connected  int
	conditions []map[string]any
	events     []map[string]any
	instead    http.HandlerFunc
}

// New starts a server. It ends with the test.
func New(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, Dir: t.TempDir(), resources: resources{
		slices: map[string]map[string]any{}, claims: map[string]any{}, changed: make(chan struct{}),
	}}
	s.conditions = []map[string]any{{"type": "Ready", "status": "True", "reason": "KubeletReady"}}
	s.server = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	certificate, ca := certificates(t)
	s.server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
	s.server.Config.ErrorLog = log.New(t.Output(), "", 0)
	s.server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			s.mu.Lock()
			s.connected++
			s.mu.Unlock()
		}
	}
	s.server.StartTLS()
	t.Cleanup(func() {
		s.server.CloseClientConnections()
		s.server.Close()
	})
	s.write("ca.crt", ca)
	s.Rotate("first")
	return s
}

// Env returns the variables of a pod on the node.
func (s *Server) Env() []string {
	host, port, err := net.SplitHostPort(s.server.Listener.Addr().String())
	testenv.Must(s.t, err)
	return []string{"KUBERNETES_SERVICE_HOST=" + host, "KUBERNETES_SERVICE_PORT=" + port, "NODE_NAME=" + Node}
}

// Rotate replaces the token. The old one is refused from now on.
func (s *Server) Rotate(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = token
	s.write("token", []byte(token+"\n"))
}

// NewCA replaces ca.crt by the certificate of a CA that has not signed the server's certificate.
func (s *Server) NewCA() {
	_, ca := certificates(s.t)
	s.write("ca.crt", ca)
}

func (s *Server) write(name string, data []byte) {
	path := filepath.Join(s.Dir, name)
	testenv.Must(s.t, os.WriteFile(path+".new", data, 0o600))
	testenv.Must(s.t, os.Rename(path+".new", path))
}

// Instead makes f answer all requests from now on; nil restores the server's own answers.
func (s *Server) Instead(f http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instead = f
}

// Hang makes the server never answer from now on.
func (s *Server) Hang() {
	s.Instead(func(_ http.ResponseWriter, q *http.Request) {
		_, _ = io.Copy(io.Discard, q.Body) // after the body is read, the context ends with the connection
		<-q.Context().Done()
	})
}

// Requests returns the number of requests so far.
func (s *Server) Requests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests
}

// Connections returns the number of connections so far.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connected
}

// Condition returns the Node's condition of a type, or nil.
func (s *Server) Condition(kind string) *Condition {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range decode[[]*Condition](s.t, s.conditions) {
		if c.Type == kind {
			return c
		}
	}
	return nil
}

// Events returns the Node's Events in the order of their creation.
func (s *Server) Events() []Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return decode[[]Event](s.t, s.events)
}

// decode decodes JSON into a T. A key without a field fails the test.
func decode[T any](t testing.TB, from any) T {
	data, err := json.Marshal(from)
	var to T
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields()
		err = d.Decode(&to)
	}
	if err != nil {
		t.Errorf("%s: %v", data, err)
	}
	return to
}

func (s *Server) serve(w http.ResponseWriter, q *http.Request) {
	s.mu.Lock()
	s.requests++
	instead := s.instead
	s.mu.Unlock()
	if instead != nil {
		instead(w, q)
		return
	}
	if q.URL.Query().Has("watch") && q.URL.Path == slicesPath {
		s.watch(w, q)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var body map[string]any
	hasBody := q.Method != http.MethodGet && q.Method != http.MethodDelete
	if data, err := io.ReadAll(q.Body); err != nil || hasBody && json.Unmarshal(data, &body) != nil {
		Fail(w, http.StatusBadRequest, "the body is not JSON")
		return
	}
	const events = "/api/v1/namespaces/default/events"
	want := map[string]string{
		http.MethodPost: "application/json", http.MethodPut: "application/json",
		http.MethodPatch: "application/strategic-merge-patch+json",
	}[q.Method]
	name, one := strings.CutPrefix(q.URL.Path, events+"/")
	switch {
	case q.Header.Get("Authorization") != "Bearer "+s.token:
		Fail(w, http.StatusUnauthorized, "the token is not valid")
	case q.Header.Get("Content-Type") != want:
		Fail(w, http.StatusUnsupportedMediaType, q.Method+" of "+q.Header.Get("Content-Type"))
	case q.Method == http.MethodPost && q.URL.Path == events:
		s.create(w, body)
	case q.Method == http.MethodPatch && one:
		s.update(w, name, body)
	case q.Method == http.MethodPatch && q.URL.Path == "/api/v1/nodes/"+Node+"/status":
		s.patchNode(w, body)
	default:
		s.serveResource(w, q, body)
	}
}

// Fail answers with a Status object.
func Fail(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code,
	})
}

func nameOf(event map[string]any) string {
	metadata, _ := event["metadata"].(map[string]any)
	name, _ := metadata["name"].(string)
	return name
}

func (s *Server) create(w http.ResponseWriter, event map[string]any) {
	e := decode[Event](s.t, event)
	switch {
	case slices.ContainsFunc(s.events, func(o map[string]any) bool { return nameOf(o) == e.Metadata.Name }):
		Fail(w, http.StatusConflict, fmt.Sprintf("events %q already exists", e.Metadata.Name))
		return
	case e.Metadata.Namespace != "default" || e.InvolvedObject.Namespace != "":
		Fail(w, http.StatusUnprocessableEntity, "involvedObject.namespace: does not match event.namespace")
		return
	}
	s.events = append(s.events, event)
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(event)
}

func (s *Server) update(w http.ResponseWriter, name string, patch map[string]any) {
	for _, event := range s.events {
		if nameOf(event) == name {
			maps.Copy(event, patch)
			_ = json.NewEncoder(w).Encode(event)
			return
		}
	}
	Fail(w, http.StatusNotFound, fmt.Sprintf("events %q not found", name))
}

// Forget drops the Events, as the API server does after an hour.
func (s *Server) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = nil
}

// patchNode merges conditions by their type, as a strategic merge patch does.
func (s *Server) patchNode(w http.ResponseWriter, patch map[string]any) {
	status, _ := patch["status"].(map[string]any)
	list, _ := status["conditions"].([]any)
	if len(patch) != 1 || len(status) != 1 || len(list) == 0 {
		s.t.Errorf("the patch has something else than conditions: %v", patch)
	}
	for _, item := range list {
		c := item.(map[string]any)
		at := slices.IndexFunc(s.conditions, func(old map[string]any) bool { return old["type"] == c["type"] })
		if at < 0 {
			s.conditions = append(s.conditions, c)
			continue
		}
		maps.Copy(s.conditions[at], c)
	}
	// A Node with its images is large.
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Node", "images": strings.Repeat("image ", 1<<17)})
}

// certificates returns a certificate for 127.0.0.1 and the certificate of the CA that has signed it, as PEM.
func certificates(t testing.TB) (tls.Certificate, []byte) {
	t.Helper()
	must := func(err error) {
		testenv.Must(t, err)
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kube-apiserver"},
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	signed, err := x509.CreateCertificate(rand.Reader, leaf, ca, key.Public(), caKey)
	must(err)
	self, err := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	must(err)
	pemOfCA := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: self})
	return tls.Certificate{Certificate: [][]byte{signed}, PrivateKey: key}, pemOfCA
}

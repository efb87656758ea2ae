package apiservertest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

// NodeUID is the UID of the Node object.
const NodeUID = "11111111-2222-3333-4444-555555555555"

const (
	resourceAPI = "/apis/resource.k8s.io/v1"
	slicesPath  = resourceAPI + "/resourceslices"
	claimsPath  = resourceAPI + "/namespaces/"
	nodePath    = "/api/v1/nodes/" + Node
)

// resources are the objects of the API group resource.k8s.io.
type resources struct {
	slices  map[string]map[string]any // ResourceSlices by name
	claims  map[string]any            // ResourceClaims by NAMESPACE/NAME
	version int                       // the last resourceVersion
	changes []change                  // of the ResourceSlices
	changed chan struct{}             // closed and replaced at each change
	writes  []string

	allocatable map[string]string // of the Node
}

// change is an event of a watch.
type change struct {
	version int
	Type    string         `json:"type"`
	Object  map[string]any `json:"object"`
}

// SetAllocatable sets the allocatable resources of the Node, as the kubelet does.
func (s *Server) SetAllocatable(resources map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.allocatable = resources
}

// SetClaim stores a ResourceClaim, or removes it if the object is nil.
func (s *Server) SetClaim(namespace, name string, claim any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if claim == nil {
		delete(s.claims, namespace+"/"+name)
		return
	}
	s.claims[namespace+"/"+name] = claim
}

// ChangeClaim changes a ResourceClaim that SetClaim has stored.
func (s *Server) ChangeClaim(namespace, name string, change func(map[string]any)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s.claims[namespace+"/"+name].(map[string]any))
}

// Slices decodes the ResourceSlices, ordered by name, into a list.
func (s *Server) Slices(into any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	data, err := json.Marshal(s.sorted(func(map[string]any) bool { return true }))
	testenv.Must(s.t, err, json.Unmarshal(data, into))
}

// Writes returns what was done to ResourceSlices through the API, such as "create a (generation 1)", and forgets it.
func (s *Server) Writes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.writes
	s.writes = nil
	return list
}

// PutSlice stores a ResourceSlice without a request, as another program does.
func (s *Server) PutSlice(slice map[string]any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(slice)
}

// DeleteSlice deletes a ResourceSlice without a request, as the kubelet does.
func (s *Server) DeleteSlice(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(name)
}

func (s *Server) sorted(match func(map[string]any) bool) []map[string]any {
	list := []map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(s.slices)) {
		if match(s.slices[name]) {
			list = append(list, s.slices[name])
		}
	}
	return list
}

// store stores a slice with a new resourceVersion.
func (s *Server) store(slice map[string]any) {
	kind := "MODIFIED"
	if s.slices[nameOf(slice)] == nil {
		kind = "ADDED"
	}
	s.version++
	metadata := slice["metadata"].(map[string]any)
	metadata["resourceVersion"] = strconv.Itoa(s.version)
	s.slices[nameOf(slice)] = slice
	s.note(kind, slice)
}

func (s *Server) drop(name string) {
	slice := s.slices[name]
	delete(s.slices, name)
	s.version++
	s.note("DELETED", slice)
}

func (s *Server) note(kind string, slice map[string]any) {
	s.changes = append(s.changes, change{s.version, kind, slice})
	close(s.changed)
	s.changed = make(chan struct{})
}

// serveResource answers a request for a ResourceSlice, a ResourceClaim or the Node.
func (s *Server) serveResource(w http.ResponseWriter, q *http.Request, body map[string]any) {
	name, one := strings.CutPrefix(q.URL.Path, slicesPath+"/")
	switch claim, isClaim := strings.CutPrefix(q.URL.Path, claimsPath); {
	case q.Method == http.MethodGet && q.URL.Path == nodePath:
		answer(w, map[string]any{
			"kind": "Node", "metadata": map[string]any{"name": Node, "uid": NodeUID},
			"status": map[string]any{"allocatable": s.allocatable},
		})
	case q.Method == http.MethodGet && q.URL.Path == resourceAPI:
		answer(w, map[string]any{"kind": "APIResourceList"})
	case q.Method == http.MethodGet && isClaim:
		s.serveClaim(w, claim)
	case q.Method == http.MethodGet && q.URL.Path == slicesPath:
		answer(w, map[string]any{
			"kind": "ResourceSliceList", "metadata": map[string]any{"resourceVersion": strconv.Itoa(s.version)},
			"items": s.sorted(selector(q)),
		})
	case q.Method == http.MethodPost && q.URL.Path == slicesPath:
		s.writeSlice(w, "create", nameOf(body), body)
	case q.Method == http.MethodPut && one:
		s.writeSlice(w, "update", name, body)
	case q.Method == http.MethodDelete && one:
		if s.slices[name] == nil {
			Fail(w, http.StatusNotFound, fmt.Sprintf("resourceslices %q not found", name))
			return
		}
		s.drop(name)
		s.writes = append(s.writes, "delete "+name)
		answer(w, map[string]any{"kind": "Status", "status": "Success"})
	default:
		s.t.Errorf("%s %s", q.Method, q.URL)
		Fail(w, http.StatusNotFound, "the server could not find the requested resource")
	}
}

func (s *Server) serveClaim(w http.ResponseWriter, path string) {
	namespace, name, _ := strings.Cut(path, "/resourceclaims/")
	claim := s.claims[namespace+"/"+name]
	if claim == nil {
		Fail(w, http.StatusNotFound, fmt.Sprintf("resourceclaims.resource.k8s.io %q not found", name))
		return
	}
	answer(w, claim)
}

// writeSlice creates or updates a slice like the API server: it sets the time of taints, and refuses an update of
// another version than the last.
func (s *Server) writeSlice(w http.ResponseWriter, how, name string, slice map[string]any) {
	old := s.slices[name]
	switch {
	case how == "create" && old != nil:
		Fail(w, http.StatusConflict, fmt.Sprintf("resourceslices %q already exists", name))
		return
	case how == "update" && old == nil:
		Fail(w, http.StatusNotFound, fmt.Sprintf("resourceslices %q not found", name))
		return
	case how == "update" && metadataOf(old)["resourceVersion"] != metadataOf(slice)["resourceVersion"]:
		Fail(w, http.StatusConflict, "the object has been modified; please apply your changes to the latest version")
		return
	}
	spec := decode[map[string]any](s.t, slice["spec"])
	devices, _ := spec["devices"].([]any)
	tainted := false
	for _, d := range devices {
		taints, _ := d.(map[string]any)["taints"].([]any)
		for _, taint := range taints {
			tainted = true
			if t := taint.(map[string]any); t["timeAdded"] == nil {
				t["timeAdded"] = time.Now().UTC().Format(time.RFC3339)
			}
		}
	}
	if len(devices) > 128 || tainted && len(devices) > 64 {
		Fail(w, http.StatusUnprocessableEntity, fmt.Sprintf("spec.devices: Too many: %d", len(devices)))
		return
	}
	slice["spec"] = spec
	s.store(slice)
	pool, _ := spec["pool"].(map[string]any)
	s.writes = append(s.writes, fmt.Sprintf("%s %s (generation %v)", how, name, pool["generation"]))
	answer(w, slice)
}

// watch sends changes of ResourceSlices until the client ends the request.
func (s *Server) watch(w http.ResponseWriter, q *http.Request) {
	since, err := strconv.Atoi(q.URL.Query().Get("resourceVersion"))
	if err != nil {
		Fail(w, http.StatusBadRequest, "resourceVersion: "+err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	match := selector(q)
	for {
		s.mu.Lock()
		changed := s.changed
		for _, c := range s.changes {
			if c.version > since && match(c.Object) {
				_ = json.NewEncoder(w).Encode(c)
			}
		}
		since = s.version
		s.mu.Unlock()
		_ = http.NewResponseController(w).Flush()
		select {
		case <-q.Context().Done():
			return
		case <-changed:
		}
	}
}

// selector returns what the field selector of a request selects.
func selector(q *http.Request) func(map[string]any) bool {
	return func(slice map[string]any) bool {
		spec, _ := slice["spec"].(map[string]any)
		for term := range strings.SplitSeq(q.URL.Query().Get("fieldSelector"), ",") {
			path, value, _ := strings.Cut(term, "=")
			if field := strings.TrimPrefix(path, "spec."); term != "" && spec[field] != value {
				return false
			}
		}
		return true
	}
}

func metadataOf(object map[string]any) map[string]any {
	metadata, _ := object["metadata"].(map[string]any)
	return metadata
}

func answer(w http.ResponseWriter, object any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object)
}

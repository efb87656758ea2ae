package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"gpu-cdi-plugin/manager"
)

func (s *Server) healthz(*http.Request) (any, error) {
	if err := s.Manager.Check(); err != nil {
		return nil, &Error{
			Text: err.Error(), Code: http.StatusServiceUnavailable, Reason: "ServiceUnavailable",
			Hint: "restart the manager",
		}
	}
	return map[string]string{"status": "ok"}, nil
}

func (s *Server) pods(*http.Request) (any, error) {
	list := PodList{Items: []Pod{}}
	for _, p := range s.Manager.Pods() {
		list.Items = append(list.Items, s.podOf(p))
	}
	return list, nil
}

func (s *Server) pod(q *http.Request) (any, error) {
	p, found := s.Manager.Pod(q.PathValue("uid"))
	if !found {
		return nil, fmt.Errorf("pod %q: %w", q.PathValue("uid"), manager.ErrNotFound)
	}
	return s.podOf(p), nil
}

func (s *Server) admit(q *http.Request) (any, error) {
	manifest, _ := io.ReadAll(q.Body) // the body is in memory
	p, err := s.ParsePod(manifest)
	if err != nil {
		return nil, badRequest("%v", err)
	}
	placed, err := s.Manager.Admit(q.Context(), p, callerOf(q))
	if err != nil {
		return nil, err
	}
	return s.podOf(placed), nil
}

// checkPod returns an error if a pod is a lease, whose devices its process may use.
func (s *Server) checkPod(q *http.Request) error {
	if p, _ := s.Manager.Pod(q.PathValue("uid")); p.Lease != nil {
		return &Error{
			Text: "pod " + p.Pod.UID + " is a lease", Code: http.StatusConflict, Reason: "Conflict",
			Hint: "device-manager lease end " + p.Pod.Name + " ends it",
		}
	}
	return nil
}

func (s *Server) release(q *http.Request) (any, error) {
	if err := s.checkPod(q); err != nil {
		return nil, err
	}
	return nil, s.Manager.Release(q.Context(), q.PathValue("uid"))
}

func (s *Server) start(q *http.Request) (any, error) {
	if err := s.checkPod(q); err != nil {
		return nil, err
	}
	return s.Manager.Start(q.Context(), q.PathValue("uid"), q.PathValue("container"))
}

func (s *Server) ended(q *http.Request) (any, error) {
	if err := s.checkPod(q); err != nil {
		return nil, err
	}
	return nil, s.Manager.Ended(q.Context(), q.PathValue("uid"), q.PathValue("container"))
}

func (s *Server) devices(*http.Request) (any, error) {
	list := ResourceList{Items: s.Manager.Resources(), Withheld: s.Manager.Withheld()}
	if list.Items == nil {
		list.Items = []manager.Resource{}
	}
	return list, nil
}

func (s *Server) free(q *http.Request) (any, error) {
	data, _ := io.ReadAll(q.Body) // the body is in memory
	var r FreeRequest
	if err := decode(data, &r); err != nil {
		return nil, err
	}
	switch named := r.ResourceName != "" && len(r.DeviceIDs) > 0; {
	case r.All && r.ResourceName == "" && len(r.DeviceIDs) == 0:
		return nil, s.Manager.FreeAll(q.Context())
	case !r.All && named:
		return nil, s.Manager.Free(q.Context(), r.ResourceName, r.DeviceIDs)
	default:
		return nil, badRequest("want either all, or resourceName and deviceIds")
	}
}

// decode decodes the JSON of a request.
func decode(data []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return badRequest("read the request: %v", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return badRequest("read the request: there is more than one value")
	}
	return nil
}

// prometheusText is a response in Prometheus' text format, version 0.0.4.
type prometheusText []byte

func (s *Server) metrics(q *http.Request) (any, error) {
	if s.Metrics == nil {
		return nil, noRequest(q, http.StatusNotFound, "NotFound")
	}
	text, err := s.Metrics()
	if err != nil {
		return nil, fmt.Errorf("collect the metrics: %w", err)
	}
	return prometheusText(text), nil
}

func (s *Server) node(*http.Request) (any, error) { return s.NodeStatus(), nil }

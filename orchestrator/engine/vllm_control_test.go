package engine

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// controlServer answers the given routes, and 404 to all others.
func controlServer(t *testing.T, routes map[string]http.HandlerFunc) (*VLLM, *[]string) {
	t.Helper()
	var calls []string
	mux := http.NewServeMux()
	for pattern, handler := range routes {
		mux.HandleFunc(pattern, handler)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		calls = append(calls, strings.TrimSpace(r.Method+" "+r.URL.RequestURI()+" "+string(body)))
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return testClient(t, server.URL, 0), &calls
}

func answer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}
}

func TestVLLMControl(t *testing.T) {
	client, calls := controlServer(t, map[string]http.HandlerFunc{
		"POST /pause": answer(200, `{"status":"paused"}`), "POST /resume": answer(200, `{}`), "POST /reset_prefix_cache": answer(200, ""),
		"GET /weight_info": answer(200, `{"weight_version":12}`), "POST /update_weight_version": answer(200, `{"success":true}`),
	})
	for mode := PauseAbort; mode <= PauseInPlace; mode++ {
		if err := client.Pause(t.Context(), mode); err != nil {
			t.Fatal(err)
		}
	}
	version, err := client.WeightVersion(t.Context())
	if err = errors.Join(err, client.Resume(t.Context()), client.ResetCache(t.Context()), client.SetWeightVersion(t.Context(), "v3")); err != nil || version != "12" {
		t.Fatalf("version %q, %v", version, err)
	}
	want := []string{
		"POST /pause?mode=abort", "POST /pause?mode=wait&wait_for_inflight_requests=true", "POST /pause?mode=keep&clear_cache=true", "POST /pause?mode=keep&clear_cache=false",
		"GET /weight_info", "POST /resume", "POST /reset_prefix_cache", `POST /update_weight_version {"new_version":"v3"}`,
	}
	if !slices.Equal(*calls, want) {
		t.Errorf("got  %q\nwant %q", *calls, want)
	}
}

// TestVLLMWithoutControl: what does not exist is said, with what opens it.
func TestVLLMWithoutControl(t *testing.T) {
	client, calls := controlServer(t, nil)
	for name, err := range map[string]error{
		"pause": client.Pause(t.Context(), PauseKeep), "resume": client.Resume(t.Context()),
		"reset": client.ResetCache(t.Context()), "name": client.SetWeightVersion(t.Context(), "v1"),
	} {
		var e *Error
		if !errors.As(err, &e) || e.Class != FailTurn || e.StatusCode != http.StatusNotFound || !strings.Contains(err.Error(), "VLLM_SERVER_DEV_MODE") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if version, err := client.WeightVersion(t.Context()); err != nil || version != "" {
		t.Errorf("version %q, %v", version, err)
	}
	if !slices.Contains(*calls, `POST /finish_weight_update {"weight_version":"v1"}`) {
		t.Errorf("called %q", *calls)
	}
	if err := client.Pause(t.Context(), PauseMode(9)); err == nil {
		t.Error("a mode that is none was accepted")
	}
}

func TestVLLMResetThatIsRefused(t *testing.T) {
	for body, status := range map[string]int{`{"success":false}`: 200, "busy": 503, "pending": 400, "conflict": 409} {
		client, _ := controlServer(t, map[string]http.HandlerFunc{"POST /reset_prefix_cache": answer(status, body)})
		var e *Error
		if err := client.ResetCache(t.Context()); !errors.As(err, &e) || e.Class != RetryHere {
			t.Errorf("%d %s: %v", status, body, err)
		}
	}
	client, _ := controlServer(t, map[string]http.HandlerFunc{"POST /reset_prefix_cache": answer(500, "boom")})
	var e *Error
	if err := client.ResetCache(t.Context()); !errors.As(err, &e) || e.Class != RetryElsewhere {
		t.Errorf("a failure: %v", err)
	}
}

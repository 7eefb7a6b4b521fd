package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	sdklog "go.temporal.io/sdk/log"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	namespaceLimit        = time.Minute
	namespacePollInterval = 20 * time.Millisecond
)

// ensureNamespace registers the namespace, or brings the retention of an
// existing one to the wanted value, and returns once the frontend serves it.
func ensureNamespace(ctx context.Context, frontendAddress, namespace string, retention time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, namespaceLimit)
	defer cancel()
	// The client logs that it started, which concerns nobody.
	quiet := sdklog.NewStructuredLogger(slog.New(slog.DiscardHandler))
	frontend, err := client.NewLazyClient(client.Options{HostPort: frontendAddress, Namespace: namespace, Logger: quiet})
	if err != nil {
		return fmt.Errorf("connecting to the frontend: %w", err)
	}
	defer frontend.Close()
	service := frontend.WorkflowService()

	// Registering comes first, looking second: a frontend that was asked for a
	// namespace before it exists remembers for a second that it does not.
	_, err = service.RegisterNamespace(ctx, &workflowservice.RegisterNamespaceRequest{
		Namespace:                        namespace,
		WorkflowExecutionRetentionPeriod: durationpb.New(retention),
	})
	var exists *serviceerror.NamespaceAlreadyExists
	if errors.As(err, &exists) {
		err = ensureRetention(ctx, service, namespace, retention)
	}
	if err != nil {
		return fmt.Errorf("registering namespace %s: %w", namespace, err)
	}
	return waitUntilServed(ctx, service, namespace)
}

func ensureRetention(ctx context.Context, service workflowservice.WorkflowServiceClient, namespace string, retention time.Duration) error {
	described, err := service.DescribeNamespace(ctx, &workflowservice.DescribeNamespaceRequest{Namespace: namespace})
	if err != nil {
		return fmt.Errorf("reading its retention: %w", err)
	}
	config := described.GetConfig()
	if config.GetWorkflowExecutionRetentionTtl().AsDuration() == retention {
		return nil
	}
	config.WorkflowExecutionRetentionTtl = durationpb.New(retention)
	if _, err := service.UpdateNamespace(ctx, &workflowservice.UpdateNamespaceRequest{Namespace: namespace, Config: config}); err != nil {
		return fmt.Errorf("setting its retention: %w", err)
	}
	return nil
}

// waitUntilServed returns when calls for the namespace are no longer refused.
func waitUntilServed(ctx context.Context, service workflowservice.WorkflowServiceClient, namespace string) error {
	tick := time.NewTicker(namespacePollInterval)
	defer tick.Stop()
	for {
		_, err := service.CountWorkflowExecutions(ctx, &workflowservice.CountWorkflowExecutionsRequest{Namespace: namespace})
		var notFound *serviceerror.NamespaceNotFound
		if err == nil || !errors.As(err, &notFound) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for namespace %s: %w", namespace, ctx.Err())
		case <-tick.C:
		}
	}
}
